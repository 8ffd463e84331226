"""The clock of an engine in this process: the CPU time of the whole process, and jumps over waits."""

from __future__ import annotations

import time

from live.clock import DirectClock


class ProcessClock(DirectClock):
    """`DirectClock` over the CPU time of all threads, for an engine that computes on one but has others beside it."""

    def elapsed(self) -> float:
        """Seconds of CPU time of the process."""
        return time.process_time()
