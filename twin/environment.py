"""The SimPy environment of all simulations: events at absolute times, and the order of simultaneous events."""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import Event


class Priority(IntEnum):
    """The order of events at the same instant.

    The lowest priority goes first; events of equal priority go in the order in which they were scheduled.

    ==========  ====================================================================================================
    `URGENT`    SimPy's own: a process starts or is interrupted.
    `NORMAL`    SimPy's own: `succeed()` and timeouts. The last byte of a cache leaves a link.
    `ARRIVAL`   A client sends a request, so it is there before anything else happens at that instant.
    `OUTAGE`    An engine fails or recovers. Steps that would end at that instant are lost.
    `STEP_END`  An engine's step ends. The engine's index is added, so engines go in their order.
    `LATE`      Follows from a step end at its own instant: a client's next request, the arrival of a cache. It comes
                after all step ends, so that the order does not depend on which of them are fast-forwarded.
    ==========  ====================================================================================================
    """

    URGENT = 0
    NORMAL = 1
    ARRIVAL = 2
    OUTAGE = 3
    STEP_END = 16
    LATE = 1 << 20


class Environment(simpy.Environment):
    """A SimPy environment with events at absolute times.

    This class alone touches SimPy's private fields, for exactness and for speed (docs/decisions/0028):

    - SimPy schedules by delays, and `now + (when - now)` may differ from `when` in the last bit. Hence `at`.
    - An engine passes over most events of its own with `advance_to`, and moves its next one with `move_forward` where
      SimPy would interrupt the process, which takes three events.
    - SimPy raises a copy of an exception that ended a process, and a copy of `BadInput` lacks its fields. `run` raises
      the exception itself.
    """

    def at(self, when: float, priority: int = Priority.NORMAL, event: Event | None = None) -> Event:
        """An event that happens at exactly `when`, which must not lie in the past.

        Pass an `event` that processes already wait for to trigger that one; by default it is a new one.
        """
        if when < self._now:
            raise AssertionError(f"cannot wake at {when}: it is already {self._now}")
        if event is None:
            event = Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (when, priority, next(self._eid), event))  # type: ignore[misc]  # see EventPriority
        return event

    def move_forward(self, event: Event, when: float, priority: int) -> None:
        """Let an event of `at` that has not happened yet happen earlier than planned."""
        self.at(when, priority, event)  # its later entry in the queue finds that the event has happened

    def advance_to(self, when: float, priority: int) -> bool:
        """Advance the time to `when` if no other event comes before one with this priority then; whether it did.

        A process that would `yield env.at(when, priority)` may go on at once instead.
        """
        queue = self._queue
        while queue:
            first = queue[0]  # (time, priority, number, event)
            if first[0] > when or (first[0] == when and first[1] > priority):
                break
            if not first[3].processed:
                return False
            heappop(queue)  # an event that was moved forward
        self._now = when
        return True

    def run(self, until: float | Event | None = None) -> object:
        """Run as `simpy.Environment.run` does.

        Raises:
            Exception: the exception that ended a process for which none waits.
        """
        if until is not None:
            return super().run(until)
        queue = self._queue
        while queue:
            event: Any  # SimPy's type says that `callbacks` is never None
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # as SimPy's `step` does
            if callbacks is None:
                continue  # an event that was moved forward
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value
        return None
