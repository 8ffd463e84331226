"""The machine's pace while an engine runs: the same small pieces of work are timed again and again, and the run's clock
stands still meanwhile.

A shared machine drifts by tens of per cent within seconds. Whatever is timed on it says as much of the machine as of
the engine, unless something that never changes is timed beside it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from kernels.sampling import Wish
from latency_models.engine_steps import Reading
from live.engine import Engine
from live.generation import ask

SIZES = (1, 8, 64)
"""Rows of the yardsticks. Products of one row, of several and of many are computed in different ways, and wait for
different parts of a machine."""


class Yardstick:
    """A step of so many rows, a prompt's, on an engine of its own: reads all weights once, and knows no workload.

    Args:
        engine: with nothing in it, and nothing else to do.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._numbers = engine, itertools.count()
        self._task = "embed" if engine.executor.decoder.weights.head is None else "generate"

    def __call__(self, rows: int) -> float:
        """Seconds that it takes now."""
        output = 0 if self._task == "embed" else 1
        asked = ask(next(self._numbers), [0] * rows, output, wish=Wish(temperature=0.0), task=self._task)
        self._engine.submit(asked)
        begin = time.perf_counter()
        result = self._engine.step()
        seconds = time.perf_counter() - begin
        assert result is not None, "there was a prompt to compute"
        assert result.finished, "and no more than that"
        return seconds


class PacedClock:
    """Seconds since it was made, less those that went to reading the pace.

    Args:
        yardstick: what is timed, told its rows; None: nothing, and the clock is any other.
        share: of all time, that goes to it. sizes: its rows in turns, so that each has the same time.

    Attributes:
        readings: in order, their times by this clock.
    """

    def __init__(
        self, yardstick: Callable[[int], float] | None = None, share: float = 0.0, sizes: Sequence[int] = SIZES
    ) -> None:
        self.readings: list[Reading] = []
        self._yardstick, self._share = yardstick, share
        self._spent = dict.fromkeys(sizes, 0.0)
        self._start = self._due = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def rest(self) -> None:
        """Read the pace if it is time to: at first by every size, then by the one that had the least time.

        To be called when a step has just ended: after a wait the processor is cold, and the yardstick a tenth slower,
        which says nothing of the steps.
        """
        stopped = time.perf_counter()
        if self._yardstick is None or stopped < self._due:
            return
        for rows in [min(self._spent, key=self._spent.__getitem__)] if self.readings else list(self._spent):
            seconds = self._yardstick(rows)
            self.readings.append(Reading(stopped - self._start, rows, seconds))
            self._spent[rows] += seconds
        gone = time.perf_counter() - stopped
        self._start += gone
        self._due = stopped + gone / self._share
