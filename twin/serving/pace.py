"""How fast a machine is over time: a shared one drifts by tens of per cent within seconds.

The pace is a number of times: how many times as long as at the reference something takes. A validation reads it while
the live plant runs, by yardsticks that know nothing of the workload (`live.validation.pace`). Large steps and small
ones slow down apart, since what they wait for is not the same, so there are yardsticks of several sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from latency_models.yardsticks import Reading, nearest

WEIGHTS = (1, 2, 3, 2, 1)
"""Of the readings around a point of the pace, which is their mean: a single one is noise of several per cent."""

OUTLIER = 5.0
"""A reading counts for at most so many times the median of those around it, and for no less than that divided by it. A
yardstick that was interrupted was seen to take 113 times as long, which the steps around it did not; cut at twice, what
steps do lose to interruptions is lost, and they are predicted up to 2 % too fast.
"""


@dataclass(frozen=True)
class PaceLine:
    """The pace by one yardstick: a broken line through (time, factor), level before the first point and after the last.

    Attributes:
        times: seconds, rising. factors: as many; what something takes then, over what it takes at the reference.
    """

    times: Sequence[float]
    factors: Sequence[float]

    @classmethod
    def of(cls, readings: Sequence[tuple[float, float]], reference: float) -> Self:
        """From what the yardstick took: (time, seconds) in order, and the seconds that it takes at the reference."""
        times, seconds = np.array(readings).T
        median = _median_around(seconds)
        seconds = np.clip(seconds, median / OUTLIER, median * OUTLIER)
        means = _sum_around(seconds) / _sum_around(np.ones(len(seconds)))
        return cls(times.tolist(), (means / reference).tolist())

    def at(self, time: float) -> float:
        """The factor at a time, seconds."""
        times, factors = self.times, self.factors
        after = bisect_right(times, time)
        if not after:
            return factors[0]
        if after == len(times):
            return factors[-1]
        before = after - 1
        share = (time - times[before]) / (times[after] - times[before])
        return factors[before] + share * (factors[after] - factors[before])

    def over(self, begin: float, seconds: float) -> float:
        """The factor for what begins at a time and takes about so many seconds: that of its middle."""
        return self.at(begin + seconds / 2)

    def end(self, begin: float, seconds: float) -> float:
        """When what begins at a time is over, if at the reference it takes so many seconds."""
        return begin + seconds * self.over(begin, seconds)


@dataclass(frozen=True)
class Pace:
    """The pace of steps of every size.

    Attributes:
        lines: by the rows of the yardstick, at least one.
    """

    lines: Mapping[int, PaceLine]

    @classmethod
    def of(cls, readings: Iterable[Reading], references: Mapping[int, float]) -> Self:
        """From readings in order, and the seconds that each yardstick takes at the reference.

        Without readings the machine is taken to hold still.
        """
        by_rows: dict[int, list[tuple[float, float]]] = {}
        for when, rows, seconds in readings:
            by_rows.setdefault(rows, []).append((when, seconds))
        if not by_rows:
            return cls({1: PaceLine([0.0], [1.0])})
        return cls({rows: PaceLine.of(each, references[rows]) for rows, each in sorted(by_rows.items())})

    def of_rows(self, rows: int) -> PaceLine:
        """By the yardstick whose size is the nearest."""
        return self.lines[nearest(rows, self.lines)]

    def times_as_long(self, factor: float) -> Self:
        """The pace of a machine on which everything takes `factor` times as long again."""
        made = {
            rows: PaceLine(line.times, [factor * each for each in line.factors]) for rows, line in self.lines.items()
        }
        return type(self)(made)

    def means(self) -> dict[int, float]:
        """Of each line's points, by the yardstick's rows."""
        return {rows: float(np.mean(line.factors)) for rows, line in self.lines.items()}


def _sum_around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each value, the weighted sum of those around it, at the ends of as many as there are."""
    half = len(WEIGHTS) // 2
    summed: NDArray[np.float64] = np.convolve(values, WEIGHTS)[half : half + len(values)]
    return summed


def _median_around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each value, the median of those around it, at the ends of as many as there are."""
    half = len(WEIGHTS) // 2
    padded = np.pad(values, half, constant_values=np.nan)
    medians: NDArray[np.float64] = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, len(WEIGHTS)), axis=1)
    return medians
