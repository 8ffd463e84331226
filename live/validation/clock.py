"""The clock of a timed run."""

from __future__ import annotations

import time

from latency_models.speed_probes import Reading


class RunClock:
    """Seconds since the clock was made.

    Call `after_step` after each step. Here it does nothing; a subclass may pause the clock there
    (`live.validation.machine_speed.ProbingClock`).

    Attributes:
        readings: of the speed probes, taken while the clock was paused; none here.
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def after_step(self, rows: int) -> None:
        """Note that a step with `rows` rows has just ended."""
