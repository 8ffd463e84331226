"""The engine on the event loop: a step, its news, whatever has come in meanwhile, the next step.

Between two steps the loop does what its clients are waiting for: it writes tokens, and reads and parses requests, which
could not have run before the next step anyway. Nothing is handed from thread to thread and nothing waits for the
interpreter (docs/decisions/0019). A `Ticket` ends exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

from live.engine import Engine, StepResult
from live.generation import Generation
from live.seats import generation_of
from live.server.errors import ApiError, ClientGone, bad_request
from live.server.metrics import Tally
from live.server.tickets import Reason, Ticket

log = logging.getLogger("live.server")


class Group:
    """The generations of one HTTP request: they begin together, and none outlives it."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.arrived = worker, time.perf_counter()
        self.tickets: list[Ticket] = []
        self.gone = False
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def submit(self, generation: Generation) -> Ticket:
        """Have a generation run. Raises as `Worker.submit`."""
        ticket = Ticket(generation, self.arrived, self.ring)
        self.worker.submit(ticket)
        self.tickets.append(ticket)
        return ticket

    def ring(self) -> None:
        """There is news of a ticket."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait until something has happened since the last call.

        Raises:
            ApiError: a generation has failed.
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
    """An engine that is stepped by the event loop for as long as it has anything to run.

    Attributes:
        engine: to be looked at, not touched. tickets: of the generations that are not over, by their number.
        failure: why the engine no longer runs.
    """

    def __init__(self, engine: Engine, tally: Tally, loop: asyncio.AbstractEventLoop) -> None:
        self.engine, self.tally, self.loop = engine, tally, loop
        self.tickets: dict[int, Ticket] = {}
        self.failure: ApiError | None = None
        self._numbers = itertools.count()
        self._at_work = False  # the next step is in the loop's queue

    def number(self) -> int:
        """A number for a request, that no other had."""
        return next(self._numbers)

    def submit(self, ticket: Ticket) -> None:
        """Have a generation run.

        Raises:
            ApiError: 400 for one that the engine refuses, 503 when it no longer runs.
        """
        if self.failure is not None:
            raise self.failure
        try:
            self.engine.submit(ticket.generation)
        except ValueError as error:
            raise bad_request(None, str(error)) from None
        self.tickets[ticket.generation.request.id] = ticket
        if not self._at_work:
            self._at_work = True
            self.loop.call_soon(self._step)

    def cancel(self, ticket: Ticket) -> None:
        """Take a generation back; its ticket is over at once."""
        self._end(ticket, "abort")
        if self.failure is None:
            self.engine.abort(ticket.generation.request.id)

    def fail_all(self, failure: ApiError) -> None:
        """Everybody is told of an error."""
        for ticket in list(self.tickets.values()):
            ticket.failure = failure
            self._end(ticket, "error")
            if self.failure is None:
                self.engine.abort(ticket.generation.request.id)

    def _step(self) -> None:
        """Run a step if there is anything to run, tell of it, and have the next one follow on what that leads to."""
        try:
            result = self.engine.step()
            if result is None and self.engine.core.sequences:
                raise RuntimeError(f"{len(self.engine.core.sequences)} requests are here and none of them can run")
        except Exception as error:
            log.exception("the engine has failed")
            self.failure = ApiError(
                503, f"the engine has failed: {type(error).__name__}: {error}", code="engine_failed"
            )
            self.fail_all(self.failure)
            return
        self._at_work = result is not None
        if result is not None:
            self._deliver(result, time.perf_counter())
            self.loop.call_soon(self._step)

    def _deliver(self, result: StepResult, now: float) -> None:
        """What a step gave: a token more for some, and some are done."""
        tickets, tally = self.tickets, self.tally
        produced = result.produced
        for generation in itertools.chain(produced.decodes, [generation_of(each) for each, _ in produced.first_tokens]):
            ticket = tickets.get(generation.request.id)
            if ticket is None:  # taken back meanwhile
                continue
            tally.token(ticket, now)
            if ticket.first < 0:
                ticket.first = now
            ticket.latest = now
            ticket.ring()
        for generation in result.finished:
            ticket = tickets.get(generation.request.id)
            if ticket is not None:
                ticket.latest = now
                self._end(ticket, "length" if generation.ending == "length" else "stop")

    def _end(self, ticket: Ticket, reason: Reason) -> None:
        assert not ticket.over
        del self.tickets[ticket.generation.request.id]
        ticket.over = True
        self.tally.finished(ticket, reason)
        ticket.ring()
