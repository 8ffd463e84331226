"""Simulated time."""

from __future__ import annotations

from heapq import heappush

import simpy
from simpy.events import NORMAL, Event


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
