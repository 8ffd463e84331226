"""Runs the engine on the event loop: a step, its outputs, the requests that have arrived, the next step.

Between two steps the loop serves the clients: it writes tokens, and reads and parses requests, which could not have run
before the next step anyway. Nothing is passed from thread to thread, and nothing waits for the interpreter lock
(docs/decisions/0019). A `RequestState` finishes exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from live.engine import Engine, StepResult
from live.generation import Generation
from live.input_batch import generation_of
from live.server.asgi import HttpExchange
from live.server.errors import ApiError, ClientDisconnected, bad_request
from live.server.metrics import ServerStats
from live.server.request_state import FinishedReason, RequestState

log = logging.getLogger("live.server")


class RequestGroup:
    """The generations of one HTTP request: they arrive together, and are aborted when it ends.

    Attributes:
        states: one for each generation, in the order in which they were submitted.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine, self._arrival_time = engine, time.perf_counter()
        self.states: list[RequestState] = []
        self._disconnected = False
        self._notified = False
        self._waiter: asyncio.Future[None] | None = None

    def submit(self, generation: Generation) -> RequestState:
        """Run a generation. Raises as `AsyncEngine.submit`."""
        state = RequestState(generation, self._arrival_time, self.notify)
        self._engine.submit(state)
        self.states.append(state)
        return state

    def notify(self) -> None:
        """Wake the response: one of the generations has changed."""
        self._notified = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def changed(self) -> None:
        """Wait until a generation has changed since the last call.

        Raises:
            ApiError: a generation has failed.
            ClientDisconnected: the client has closed its connection.
        """
        if not self._notified:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._notified = False
        if self._disconnected:
            raise ClientDisconnected
        for state in self.states:
            if state.error is not None:
                raise state.error

    async def finished(self) -> None:
        """Wait until all generations are finished. Raises as `changed`."""
        while not all(state.finished for state in self.states):
            await self.changed()

    def disconnect(self) -> None:
        """Note that the client has closed its connection."""
        self._disconnected = True
        self.notify()

    def close(self) -> None:
        """Abort the generations that still run."""
        for state in self.states:
            if not state.finished:
                self._engine.abort(state)


class AsyncEngine:
    """An engine that the event loop steps as long as there are requests.

    Attributes:
        engine: the engine, to be looked at only. request_states: of unfinished generations, by request id.
        failure: why the engine has failed; None while it runs.
    """

    def __init__(self, engine: Engine, stats: ServerStats, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.stats, self.loop = engine, stats, loop
        self.request_states: dict[int, RequestState] = {}
        self.failure: ApiError | None = None
        self._stepping = False

    @contextmanager
    def group(self, exchange: HttpExchange) -> Iterator[RequestGroup]:
        """A group for the generations of one HTTP request.

        Generations that still run are aborted at the end of the `with` block, or when the client disconnects.
        """
        group = RequestGroup(self)
        exchange.on_disconnect(group.disconnect)
        try:
            yield group
        finally:
            group.close()

    def submit(self, state: RequestState) -> None:
        """Run a generation.

        Raises:
            ApiError: 400 for one that the engine refuses, 503 if the engine has failed.
        """
        if self.failure is not None:
            raise self.failure
        try:
            self.engine.submit(state.generation)
        except ValueError as error:
            raise bad_request(None, str(error)) from None
        self.request_states[state.generation.request.id] = state
        if not self._stepping:
            self._stepping = True
            self.loop.call_soon(self._step)

    def abort(self, state: RequestState) -> None:
        """Abort a generation; its state is finished at once."""
        self._finish(state, "abort")
        if self.failure is None:
            self.engine.abort(state.generation.request.id)

    def fail_all(self, error: ApiError) -> None:
        """End all generations with an error."""
        for state in list(self.request_states.values()):
            state.error = error
            self._finish(state, "error")
            if self.failure is None:
                self.engine.abort(state.generation.request.id)

    def _step(self) -> None:
        """Run a step, deliver its output, and schedule the next step after the callbacks of the responses."""
        try:
            result = self.engine.step()
            if result is None and self.engine.core.sequences:
                raise RuntimeError(f"{len(self.engine.core.sequences)} requests are left and none of them can run")
        except Exception as error:
            log.exception("the engine has failed")
            self.failure = ApiError(
                503, f"the engine has failed: {type(error).__name__}: {error}", code="engine_failed"
            )
            self.fail_all(self.failure)
            return
        self._stepping = result is not None
        if result is not None:
            self._deliver(result, time.perf_counter())
            self.loop.call_soon(self._step)

    def _deliver(self, result: StepResult, now: float) -> None:
        """Notify the responses of new tokens and of finished generations."""
        states, stats = self.request_states, self.stats
        output = result.output
        for generation in itertools.chain(output.decodes, [generation_of(each) for each, _ in output.first_tokens]):
            state = states.get(generation.request.id)
            if state is None:  # aborted meanwhile
                continue
            stats.record_token(state, now)
            if state.first_token_time < 0:
                state.first_token_time = now
            state.last_token_time = now
            state.notify()
        for generation in result.finished:
            state = states.get(generation.request.id)
            if state is not None:
                state.last_token_time = now
                self._finish(state, "length" if generation.finish_reason == "length" else "stop")

    def _finish(self, state: RequestState, reason: FinishedReason) -> None:
        assert not state.finished
        del self.request_states[state.generation.request.id]
        state.finished = True
        self.stats.record_finished(state, reason)
        state.notify()
