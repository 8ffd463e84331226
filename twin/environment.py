"""The SimPy environment of all simulations: events at absolute times, and the order of simultaneous events."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any, Final

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
    `SCALING`   An autoscaler looks at its engines and changes their number, or an engine that starts is up.
    `STEP_END`  An engine's step ends. The engine's index is added, so engines go in their order.
    `LATE`      Follows from a step end at its own instant: a client's next request, the arrival of a cache. It comes
                after all step ends, so that the order does not depend on which of them are fast-forwarded.
    ==========  ====================================================================================================
    """

    URGENT = 0
    NORMAL = 1
    ARRIVAL = 2
    OUTAGE = 3
    SCALING = 4
    STEP_END = 16
    LATE = 1 << 20


NOT_SET: Final = -1
"""The number of an alarm that is not set."""


class Alarm:
    """An event that happens again and again, as its owner sets it: it calls `ring`, and no process waits for it.

    It has no object, callbacks and generator for each time, and is set to one time at a time. `number`: of its entry in
    the queue, or `NOT_SET`; its other entries are passed over.
    """

    __slots__ = ("number", "priority", "ring", "when")

    def __init__(self, priority: int, ring: Callable[[float], None]) -> None:
        self.priority = priority
        self.ring = ring
        self.number: int = NOT_SET
        self.when = 0.0

    @property
    def is_set(self) -> bool:
        """Tell whether it is going to happen."""
        return self.number != NOT_SET

    def unset(self) -> None:
        """Forget the time that it is set to."""
        self.number = NOT_SET


class Environment(simpy.Environment):
    """A SimPy environment with events at absolute times.

    This class alone touches SimPy's private fields, for exactness and for speed (docs/decisions/0003 and 0033):

    - SimPy schedules by delays, and `now + (when - now)` may differ from `when` in the last bit. Hence `at`.
    - Step ends and arrivals are alarms, `set` to a time. An engine passes over most of its own with `advance_to`.
    - SimPy raises a copy of an exception that ended a process, and a copy of `BadInput` lacks its fields. `run` raises
      the exception itself.
    """

    def at(self, when: float, priority: int = Priority.NORMAL, event: Event | None = None) -> Event:
        """An event (a new one by default) that happens at exactly `when`, which must not lie in the past."""
        if when < self._now:
            raise AssertionError(f"cannot wake at {when}: it is already {self._now}")
        if event is None:
            event = Event(self)
        event._ok = True
        event._value = None
        heappush(self._queue, (when, priority, next(self._eid), event))  # type: ignore[misc]  # see EventPriority
        return event

    def set(self, alarm: Alarm, when: float) -> None:
        """Let an alarm happen at exactly `when`, in place of the time that it was set to before."""
        if when < self._now:
            raise AssertionError(f"cannot wake at {when}: it is already {self._now}")
        number = alarm.number = next(self._eid)
        alarm.when = when
        heappush(self._queue, (when, alarm.priority, number, alarm))  # type: ignore[misc]  # SimPy's is of events

    def advance_to(self, when: float, priority: int) -> bool:
        """Advance to `when` if no event comes before one with this priority then: no need to set an alarm."""
        queue: list[Any] = self._queue
        while queue:
            first = queue[0]
            if first[0] > when or (first[0] == when and first[1] > priority):
                break
            event = first[3]
            if not isinstance(event, Alarm) or event.number == first[2]:
                return False
            heappop(queue)  # an alarm that was set to another time since
        self._now = when
        return True

    def run(self, until: float | Event | None = None) -> object:
        """Run as `simpy.Environment.run`, but raise the exception itself that ended a process."""
        if until is not None:
            return super().run(until)
        self._run_to(None)
        return None

    def run_to(self, alarm: Alarm, when: float) -> None:
        """Run up to the place that `alarm`, which does not ring, has among the events of the instant `when`."""
        self.set(alarm, when)
        self._run_to(alarm)

    def _run_to(self, last: Alarm | None) -> None:
        queue = self._queue
        while queue:
            event: Any  # SimPy's type says that `callbacks` is never None
            self._now, _, number, event = heappop(queue)
            if isinstance(event, Alarm):
                if event.number == number:  # it has not been set to another time since
                    event.number = NOT_SET
                    if event is last:
                        return
                    event.ring(self._now)
                continue
            callbacks, event.callbacks = event.callbacks, None  # as SimPy's `step` does
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value
