"""The thread that owns the engine, and what the event loop knows of the answers.

The event loop puts what is to be done into an inbox; the thread does it between two steps, and sleeps when there is
nothing to do. What a step has given goes to the loop by one call, however many requests it was for. Everything that is
said of an answer's progress is said on the loop, in order: a `Ticket` ends exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Literal, TypeAlias

from live.engine import Engine, StepResult
from live.generation import Generation
from live.seats import generation_of
from live.server.errors import ApiError, ClientGone, bad_request
from live.server.metrics import Tally

log = logging.getLogger("live.server")

Reason: TypeAlias = Literal["stop", "length", "abort", "error"]


class Ticket:
    """One generation, as the event loop sees it.

    Attributes:
        generation: the engine's while it runs: of its lists no more than `known` entries may be read before it is over.
        known: tokens that have come. over: no more will. failure: what went wrong.
        arrived, first, latest: seconds of `time.perf_counter`: of the request, its first and its latest token.
    """

    __slots__ = ("arrived", "failure", "first", "generation", "group", "known", "latest", "over")

    def __init__(self, generation: Generation, group: Group, arrived: float) -> None:
        self.generation, self.group, self.arrived = generation, group, arrived
        self.known, self.over = 0, False
        self.failure: ApiError | None = None
        self.first = self.latest = -1.0


class Group:
    """The generations of one HTTP request: they begin together, and none outlives it."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.arrived = worker, time.perf_counter()
        self.tickets: list[Ticket] = []
        self.gone = False
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def submit(self, generation: Generation) -> Ticket:
        """Have a generation run."""
        ticket = Ticket(generation, self, self.arrived)
        self.tickets.append(ticket)
        self.worker.submit(ticket)
        return ticket

    def ring(self) -> None:
        """There is news of a ticket."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait until something has happened since the last call.

        Raises:
            ApiError: a generation was refused or has failed.
            ClientGone: nobody waits for the answer.
        """
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._rung = False
        if self.gone:
            raise ClientGone
        for ticket in self.tickets:
            if ticket.failure is not None:
                raise ticket.failure

    async def done(self) -> None:
        """Wait for all of them. Raises as `news`."""
        while not all(ticket.over for ticket in self.tickets):
            await self.news()

    def leave(self) -> None:
        """The client is gone."""
        self.gone = True
        self.ring()

    def close(self) -> None:
        """Whatever still runs is taken back."""
        for ticket in self.tickets:
            if not ticket.over:
                self.worker.cancel(ticket)


class Worker:
    """An engine in a thread of its own. All methods are called on the event loop, but for those said not to be.

    Attributes:
        engine: to be looked at, not touched. tickets: of the generations that are not over, by their number.
        failure: why the engine no longer runs. inbox: what its thread is to do next.
    """

    def __init__(self, engine: Engine, tally: Tally, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.tally, self.loop = engine, tally, loop
        self.tickets: dict[int, Ticket] = {}
        self.failure: ApiError | None = None
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._broken: str | None = None  # the thread's own: what its engine died of
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the step that it is in. Nobody is told: `fail_all` comes first."""
        self.inbox.put(None)
        self._thread.join(timeout=10)

    def number(self) -> int:
        """A number for a request, that no other had."""
        return next(self._numbers)

    def submit(self, ticket: Ticket) -> None:
        """Have a generation run."""
        if self.failure is not None:
            raise self.failure
        self.tickets[ticket.generation.request.id] = ticket
        self.inbox.put(lambda: self._take_in(ticket.generation))

    def cancel(self, ticket: Ticket) -> None:
        """Take a generation back; its ticket is over at once."""
        number = ticket.generation.request.id
        self._end(ticket, "abort")
        self.inbox.put(lambda: self._take_back(number))

    def fail_all(self, failure: ApiError) -> None:
        """Everybody is told of an error."""
        for ticket in list(self.tickets.values()):
            self._fail(ticket, failure)
            number = ticket.generation.request.id
            self.inbox.put(lambda number=number: self._take_back(number))  # type: ignore[misc]

    # -- what the thread does ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        idle = True
        while True:
            while idle or not self.inbox.empty():
                job = self.inbox.get()
                if job is None:
                    return
                job()
                idle = False
            idle = self._broken is not None or not self._step()

    def _step(self) -> bool:
        """Run a step if there is anything to run."""
        try:
            result = self.engine.step()
            if result is None and self.engine.core.sequences:
                raise RuntimeError(f"{len(self.engine.core.sequences)} requests are here and none of them can run")
        except Exception as error:
            log.exception("the engine has failed")
            self._broken = f"the engine has failed: {type(error).__name__}: {error}"
            self.loop.call_soon_threadsafe(self._broke, self._broken)
            return False
        if result is not None:
            self.loop.call_soon_threadsafe(self._deliver, result, time.perf_counter())
        return result is not None

    def _take_in(self, generation: Generation) -> None:
        if self._broken is not None:
            self.loop.call_soon_threadsafe(self._broke, self._broken)
            return
        try:
            self.engine.submit(generation)
        except ValueError as error:
            self.loop.call_soon_threadsafe(self._refuse, generation.request.id, str(error))

    def _take_back(self, number: int) -> None:
        if self._broken is None:
            self.engine.abort(number)

    # -- what the loop is told ---------------------------------------------------------------------------------------

    def _deliver(self, result: StepResult, now: float) -> None:
        """What a step gave: a token more for some, and some are done."""
        tickets, tally = self.tickets, self.tally
        produced = result.produced
        for generation in itertools.chain(produced.decodes, [generation_of(each) for each, _ in produced.first_tokens]):
            ticket = tickets.get(generation.request.id)
            if ticket is None:  # taken back meanwhile
                continue
            tally.token(ticket, now)
            if not ticket.known:
                ticket.first = now
            ticket.known += 1
            ticket.latest = now
            ticket.group.ring()
        for generation in result.finished:
            ticket = tickets.get(generation.request.id)
            if ticket is not None:
                ticket.latest = now
                self._end(ticket, "length" if generation.ending == "length" else "stop")

    def _refuse(self, number: int, message: str) -> None:
        ticket = self.tickets.get(number)
        if ticket is not None:
            self._fail(ticket, bad_request(None, message))

    def _broke(self, message: str) -> None:
        self.failure = ApiError(503, message, code="engine_failed")
        for ticket in list(self.tickets.values()):
            self._fail(ticket, self.failure)

    def _fail(self, ticket: Ticket, failure: ApiError) -> None:
        ticket.failure = failure
        self._end(ticket, "error")

    def _end(self, ticket: Ticket, reason: Reason) -> None:
        assert not ticket.over
        del self.tickets[ticket.generation.request.id]
        ticket.over = True
        self.tally.finished(ticket, reason)
        ticket.group.ring()
