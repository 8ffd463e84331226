"""The backend on the event loop: requests go in, and what each step has changed wakes the responses that wait for it.

A `RequestState` finishes exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from live.backend import Backend
from live.engine import Progress
from live.generation import Generation
from live.server.asgi import HttpExchange
from live.server.errors import ApiError, ClientDisconnected, bad_request, busy
from live.server.metrics import ServerStats
from live.server.request_state import FinishedReason, RequestState
from schedulers.admission_control import RequestShed


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
    """Runs generations on a backend and notifies the responses.

    Attributes:
        backend: an engine or a topology. request_states: of unfinished generations, by request id.
        failure: why the backend has failed; None while it runs. on_failure: called when it fails.
    """

    def __init__(self, backend: Backend, stats: ServerStats) -> None:
        self.backend, self.stats = backend, stats
        self.request_states: dict[int, RequestState] = {}
        self.failure: ApiError | None = None
        self.on_failure: Callable[[str], None] = lambda reason: None
        backend.start(self._deliver, self._fail)

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
            ApiError: 400 for one that the engine refuses; 429 or 503 for one that it sheds, by a limit of its tenant or
                by another one; 503 if the engine has failed.
        """
        if self.failure is not None:
            raise self.failure
        try:
            self.backend.submit(state.generation)
        except RequestShed as shed:
            self.stats.record_shed(state, shed.reason)
            message = f"the engine is overloaded ({shed.reason.replace('_', ' ')}); expected a retry later"
            raise busy(429 if shed.reason == "tenant_waiting" else 503, message, shed.retry_after) from None
        except ValueError as error:
            raise bad_request(None, str(error)) from None
        self.request_states[state.generation.request.id] = state

    def abort(self, state: RequestState) -> None:
        """Abort a generation; its state is finished at once."""
        self._finish(state, "abort")
        if self.failure is None:
            self.backend.abort(state.generation.request.id)

    def fail_all(self, error: ApiError) -> None:
        """End all generations with an error."""
        for state in list(self.request_states.values()):
            state.error = error
            self._finish(state, "error")
            if self.failure is None:
                self.backend.abort(state.generation.request.id)

    def _fail(self, reason: str) -> None:
        """Note that the backend has failed, and end all generations with an error."""
        self.failure = ApiError(503, reason, code="engine_failed")
        self.fail_all(self.failure)
        self.on_failure(reason)

    def _deliver(self, progress: Progress) -> None:
        """Notify the responses of new tokens and of finished generations."""
        states, stats, now = self.request_states, self.stats, time.perf_counter()
        for generation in progress.advanced:
            state = states.get(generation.request.id)
            if state is None:  # aborted meanwhile
                continue
            stats.record_tokens(state, now)
            if state.first_token_time < 0:
                state.first_token_time = now
            state.last_token_time = now
            state.notify()
        for generation in progress.finished:
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
