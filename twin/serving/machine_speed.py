"""The speed of a machine over time. A shared machine drifts by tens of per cent within seconds.

Speed is expressed as a factor: the duration of a step divided by that at the reference speed. A validation measures it
while the live engine runs, with speed probes that are independent of the workload. Small and large steps wait for
different parts of the machine and slow down independently, so there are probes of several sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from latency_models.speed_probes import Reading, nearest

WEIGHTS = (1, 2, 3, 2, 1)
"""Weights of the readings around a point. A single reading has noise of several per cent, so a point is their mean."""

OUTLIER = 5.0
"""Readings are clipped to this factor above and below the median of their neighbours.

An interrupted probe has taken 113 times as long, while the steps around it were unaffected. With a factor of 2 the time
that steps do lose to interruptions is clipped too, and steps are predicted up to 2 % too fast.
"""


@dataclass(frozen=True)
class SpeedLine:
    """The factor by one probe: piecewise linear through (time, factor), constant before and after these points.

    Attributes:
        times: seconds, rising. factors: one a time; the duration then, divided by the duration at the reference.
    """

    times: Sequence[float]
    factors: Sequence[float]

    @classmethod
    def of(cls, readings: Sequence[tuple[float, float]], reference: float) -> Self:
        """Build from a probe's readings, (time, seconds) in order, and its duration at the reference, seconds."""
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
        """The factor for an interval of about `seconds` from `begin`: the factor at its middle."""
        return self.at(begin + seconds / 2)

    def end(self, begin: float, seconds: float) -> float:
        """The end of a step that starts at `begin` and takes `seconds` at the reference."""
        return begin + seconds * self.over(begin, seconds)


@dataclass(frozen=True)
class MachineSpeed:
    """The speed of a machine for steps of every size.

    Attributes:
        lines: one line a probe, by the probe's rows. At least one.
    """

    lines: Mapping[int, SpeedLine]

    @classmethod
    def of(cls, readings: Iterable[Reading], references: Mapping[int, float]) -> Self:
        """Build from readings in order, and the duration of each probe at the reference, seconds.

        Without readings the speed is constant.
        """
        by_rows: dict[int, list[tuple[float, float]]] = {}
        for when, rows, seconds in readings:
            by_rows.setdefault(rows, []).append((when, seconds))
        if not by_rows:
            return cls({1: SpeedLine([0.0], [1.0])})
        return cls({rows: SpeedLine.of(each, references[rows]) for rows, each in sorted(by_rows.items())})

    def of_rows(self, rows: int) -> SpeedLine:
        """The line of the probe whose size is nearest to `rows`."""
        return self.lines[nearest(rows, self.lines)]

    def times_as_long(self, factor: float) -> Self:
        """The speed of a machine on which every step takes `factor` times as long."""
        lines = {
            rows: SpeedLine(line.times, [factor * each for each in line.factors]) for rows, line in self.lines.items()
        }
        return type(self)(lines)

    def means(self) -> dict[int, float]:
        """The mean factor of each line's points, by the probe's rows."""
        return {rows: float(np.mean(line.factors)) for rows, line in self.lines.items()}


def _sum_around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weighted sum around each value; at both ends, of the values that exist."""
    half = len(WEIGHTS) // 2
    sums: NDArray[np.float64] = np.convolve(values, WEIGHTS)[half : half + len(values)]
    return sums


def _median_around(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median around each value; at both ends, of the values that exist."""
    half = len(WEIGHTS) // 2
    padded = np.pad(values, half, constant_values=np.nan)
    medians: NDArray[np.float64] = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, len(WEIGHTS)), axis=1)
    return medians
