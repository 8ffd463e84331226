"""Who sends requests: open-loop clients by the clock, closed-loop clients as soon as they have their answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from twin.clock import Clock
from twin.serving.engine import LATE_RANK
from twin.serving.records import RequestRecord
from twin.serving.system import System
from workloads.request import Request

ARRIVAL_RANK = 0
"""Arrivals come before whatever else happens at the same instant."""


class OpenLoop:
    """Sends each request at its arrival time, whatever happens to the others."""

    def __init__(self, clock: Clock, system: System, requests: Iterator[tuple[Request, int]]) -> None:
        self._clock, self._system, self._requests = clock, system, requests
        self._next: RequestRecord | None = None

    def start(self) -> None:
        """Begin to send."""
        self._schedule()

    def done(self, record: RequestRecord) -> None:
        """A request is answered: nothing to do."""

    def _schedule(self) -> None:
        for request, answer in self._requests:
            self._next = RequestRecord(request, answer)
            self._clock.call(request.arrival, ARRIVAL_RANK, self._send)
            return

    def _send(self, number: int) -> None:
        record = self._next
        assert record is not None
        self._system.submit(record)
        self._schedule()


class ClosedLoop:
    """Keeps `concurrency` requests under way: whoever is answered sends the next one `think()` seconds later."""

    def __init__(
        self,
        clock: Clock,
        system: System,
        requests: Iterator[tuple[Request, int]],
        concurrency: int,
        think: Callable[[], float],
    ) -> None:
        self._clock, self._system, self._requests = clock, system, requests
        self._concurrency, self._think = concurrency, think

    def start(self) -> None:
        """Every client sends its first request, at time 0."""
        for _ in range(self._concurrency):
            self._clock.call(0.0, ARRIVAL_RANK, self._send)

    def done(self, record: RequestRecord) -> None:
        """A request is answered, and its client sends the next."""
        self._clock.call(self._clock.now + self._think(), LATE_RANK, self._send)

    def _send(self, number: int) -> None:
        for request, answer in self._requests:
            now = self._clock.now
            moved = Request(
                request.id,
                now,
                request.prompt_tokens,
                request.max_tokens,
                request.model,
                request.prefix_blocks,
                request.task,
                request.priority,
            )
            self._system.submit(RequestRecord(moved, answer), late=now > 0)
            return
