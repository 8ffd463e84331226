"""Simulated time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL, Event

Action = Callable[[int], None]
"""What a call does; handed the call's number."""


class Clock(simpy.Environment):
    """A SimPy environment that can also be asked to wake somebody at an absolute time.

    SimPy's `timeout` takes a delay and wakes at `now + delay`. A process that has computed *when* it wants to wake
    would lose the last bit in `now + (when - now)`, and with it the equality of fast-forwarded and step-by-step runs.
    """

    def at(self, when: float) -> Event:
        """An event that happens at exactly `when`, which must not lie in the past."""
        if when < self._now:
            raise AssertionError(f"cannot wake at {when}: it is already {self._now}")
        event = Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (when, NORMAL, next(self._eid), event))
        return event

    def call(self, when: float, rank: int, action: Action) -> int:
        """Have `action` called at exactly `when`. Of several calls at one instant the lowest rank goes first.

        A sixth of the cost of a process that sleeps: no event object, no generator. `action` is handed the number that
        is returned here, so that a caller who has changed his mind can tell the call he still wants from the others.
        """
        number = next(self._eid)
        heappush(self._queue, (when, rank, number, action))  # type: ignore[misc]  # ranks and calls are ours
        return number

    def pass_to(self, when: float, rank: int) -> bool:
        """Make it `when` if nothing else is due before a call of that rank would be; whether it did.

        For a caller who would only ask to be called: it saves the way through the queue.
        """
        queue = self._queue
        if queue:
            head = queue[0]
            if head[0] < when or (head[0] == when and head[1] <= rank):
                return False
        self._now = when
        return True

    def run(self, until: float | Event | None = None) -> object:
        """As SimPy's, with calls; `until` is for models that are made of processes alone."""
        if until is not None:
            return super().run(until)
        queue = self._queue
        while queue:
            self._now, _, number, what = heappop(queue)
            if isinstance(what, Event):
                self._happen(what)
            else:
                what(number)
        return None

    def _happen(self, event: Event) -> None:
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy marks what is over
        for callback in callbacks:
            callback(event)
        if not event._ok and not event._defused:
            raise event._value
