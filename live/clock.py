"""The clock of a live run: wall time, or the CPU time of the run's own computation.

wall    the time that passes. Waiting sleeps.
direct  direct execution: the code runs for real, and its clock counts the CPU time of the thread that reads it. Waiting
        jumps to the end of the wait. Work of other processes is not counted, and no time passes idle.

Both clocks measure; neither predicts anything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

ClockName = Literal["wall", "direct"]

SPIN_SECONDS = 1e-3
"""Seconds before the end of a wait at which it turns from sleeping to polling: a sleep can end that late."""


class Clock:
    """Seconds since `start`, or since the clock was made, by `elapsed`; a call reads it, `wait_until` waits."""

    name: ClassVar[ClockName]

    def __init__(self) -> None:
        self._offset = 0.0
        self.start()

    def __call__(self) -> float:
        return self.elapsed() + self._offset

    def start(self) -> None:
        """Set the clock to 0."""
        self.set(0.0)

    def set(self, moment: float) -> None:
        """Let the clock show `moment`, and go on from there."""
        self._offset = moment - self.elapsed()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for the block."""
        now = self()
        try:
            yield
        finally:
            self._offset -= self() - now

    def elapsed(self) -> float:
        """Seconds from an arbitrary zero."""
        raise NotImplementedError

    def wait_until(self, moment: float) -> None:
        """Return when the clock shows at least `moment`; at once if it does already."""
        raise NotImplementedError


class WallClock(Clock):
    """Wall time."""

    name = "wall"

    def elapsed(self) -> float:
        """Seconds of wall time."""
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        """Sleep until shortly before `moment`, and poll until then."""
        while (left := moment - self()) > 0:
            if left > SPIN_SECONDS:
                time.sleep(left - SPIN_SECONDS)


class DirectClock(Clock):
    """A virtual clock: the CPU time of the thread that made it, and the waits that it jumped over.

    It must be read from that thread, which must compute alone: CPU time of several threads would add up, although they
    run side by side. A role waits for a message until `sent + latency + size / bandwidth` of the sender's clock.
    """

    name = "direct"

    def elapsed(self) -> float:
        """Seconds of CPU time of the calling thread."""
        return time.thread_time()

    def wait_until(self, moment: float) -> None:
        """Jump to `moment`."""
        self._offset += max(moment - self(), 0.0)


class RanksClock(DirectClock):
    """`DirectClock` of the first of several ranks that compute a step together, as if all had a core each.

    `behind`: seconds, so far, in which this rank has waited for others.
    """

    def __init__(self, behind: Callable[[], float]) -> None:
        self._behind = behind
        super().__init__()

    def elapsed(self) -> float:
        """Seconds of CPU time of the calling thread, and of what it has waited for."""
        return super().elapsed() + self._behind()


CLOCKS: Mapping[ClockName, Callable[[], Clock]] = MappingProxyType({"wall": WallClock, "direct": DirectClock})
"""The clocks by name."""
