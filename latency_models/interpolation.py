"""Interpolation between measured points: on one axis, on two, and the parts that grids of more axes need.

Everything in this package that interpolates does it here, with one exception: `EcTables` calls
`schedulers.step_policies.interpolate`, so that its step times equal those that the SLO scheduler computes, bit for bit.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def bracket(axis: Sequence[float], x: float) -> tuple[int, float]:
    """The interval of a rising axis that x ≥ axis[0] lies in: its index i, and the share of the way to axis[i + 1].

    The last interval extends beyond the axis, with shares above 1.
    """
    i = bisect_right(axis, x) - 1
    if i > len(axis) - 2:
        i = len(axis) - 2
    low = axis[i]
    return i, (x - low) / (axis[i + 1] - low)


def line_through(start: tuple[float, float], end: tuple[float, float], x: float) -> float:
    """The value at x of the straight line through two points (x, y)."""
    (x0, y0), (x1, y1) = start, end
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def level(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly between the points (xs rise); constant below the first and beyond the last."""
    i = bisect_right(xs, x)
    if i == 0:
        return ys[0]
    if i == len(xs):
        return ys[-1]
    y, start = ys[i - 1], xs[i - 1]
    return y + (ys[i] - y) * (x - start) / (xs[i] - start)


class Curve:
    """Seconds by a size, a straight line from point to point.

    Below the first point it stays level: a kernel has a shortest time. Beyond the last it keeps its last slope, but
    never falls. `x` rises; a size measured more than once counts by its mean.
    """

    __slots__ = ("_slope", "x", "y")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        measured: dict[float, list[float]] = {}
        for size, seconds in points:
            measured.setdefault(size, []).append(seconds)
        self.x = tuple(sorted(measured))
        self.y = tuple(sum(measured[size]) / len(measured[size]) for size in self.x)
        assert self.x, "a curve needs a point"
        last = len(self.x) - 1
        self._slope = max((self.y[last] - self.y[last - 1]) / (self.x[last] - self.x[last - 1]), 0.0) if last else 0.0

    def at(self, size: float) -> float:
        """Seconds at one size."""
        x, y = self.x, self.y
        if size <= x[0]:
            return y[0]
        if size >= x[-1]:
            return y[-1] + self._slope * (size - x[-1])
        after = bisect_left(x, size)
        before = after - 1
        return y[before] + (y[after] - y[before]) * ((size - x[before]) / (x[after] - x[before]))

    def document(self) -> dict[str, list[float]]:
        """Plain lists, from which `from_document` makes an equal curve."""
        return {"size": list(self.x), "seconds": list(self.y)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Curve:
        """The curve that `document` wrote down."""
        return cls(zip(document["size"], document["seconds"], strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self) -> int:
        return hash((self.x, self.y))


def weighted_sum(parts: Iterable[tuple[float, Curve]]) -> Curve:
    """The curve that is everywhere the sum of some curves, each times its weight (0 or more)."""
    terms = list(parts)
    sizes = sorted({size for _, curve in terms for size in curve.x})
    return Curve((size, sum(weight * curve.at(size) for weight, curve in terms)) for size in sizes)


class Surface:
    """Seconds by a count and a size: a curve over sizes for each count measured, straight lines between the curves.

    Below the first count it stays level; beyond the last it continues the line through the last two.
    """

    __slots__ = ("_counts", "curves")

    def __init__(self, curves: Mapping[int, Curve]) -> None:
        self.curves = dict(sorted(curves.items()))
        self._counts = tuple(self.curves)
        assert self._counts, "a surface needs a curve"

    def between(self, count: float) -> tuple[Curve, Curve, float]:
        """The two curves whose blend is the one at `count`, and the weight of the second."""
        counts = self._counts
        if len(counts) == 1 or count <= counts[0]:
            return self.curves[counts[0]], self.curves[counts[0]], 0.0
        after = min(bisect_left(counts, count), len(counts) - 1)
        low, high = counts[after - 1], counts[after]
        return self.curves[low], self.curves[high], (count - low) / (high - low)

    def at(self, count: float, size: float) -> float:
        """Seconds at one count and size."""
        low, high, share = self.between(count)
        return blend(low, high, share, size)

    def document(self) -> list[dict[str, Any]]:
        """Plain lists, from which `from_document` makes an equal surface."""
        return [{"count": count, **curve.document()} for count, curve in self.curves.items()]

    @classmethod
    def from_document(cls, document: Iterable[Mapping[str, Any]]) -> Surface:
        """The surface that `document` wrote down."""
        return cls({curve["count"]: Curve.from_document(curve) for curve in document})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surface) and self.curves == other.curves

    def __hash__(self) -> int:
        return hash(tuple(self.curves.items()))


def blend(low: Curve, high: Curve, share: float, size: float) -> float:
    """Interpolate at one size, `share` of the way from one curve to another."""
    seconds = low.at(size)
    return max(seconds + share * (high.at(size) - seconds), 0.0) if share else seconds


Point = tuple[float, ...]
Flag = Callable[[str, float], None]
"""Called with the name of an axis and a value beyond what was measured on it."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """Times (nested lists) at every combination of the axes' rising values from 0, and the largest measured ones.

    `reach`: the largest measured value on the last axis, at the others; None where the grid is full.
    """

    axes: tuple[list[float], ...]
    times: Any
    limits: tuple[float, ...]
    reach: Any

    def __deepcopy__(self, memo: dict[int, object]) -> Grid:
        return self  # never changes


def make_grid(points: Mapping[Point, float], scale: float) -> Grid:
    """A grid from its measured points, times multiplied by `scale`."""
    columns = list(zip(*points, strict=True))
    axes = [np.array(sorted(set(column)), dtype=np.float64) for column in columns]  # np.unique would load numpy.ma
    times = np.full([len(axis) for axis in axes], math.nan)
    places = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, columns, strict=True))
    times[places] = list(points.values())
    limits = tuple(float(axis[-1]) for axis in axes)
    times = _filled(times, axes)
    reach = None
    if np.isnan(times).any():
        last = axes[-1][np.maximum((~np.isnan(times)).cumsum(axis=-1).argmax(axis=-1), 0)]
        reach = np.where(np.isnan(times).all(axis=-1), -1.0, last)
        times = _continued(times, axes)
    for i, axis in enumerate(axes):
        axes[i], times, reach = _from_zero(axis, times, reach, i)
    nested = None if reach is None else reach.tolist()
    return Grid(tuple(axis.tolist() for axis in axes), (times * scale).tolist(), limits, nested)


def _from_zero(axis: Floats, times: Floats, reach: Floats | None, i: int) -> tuple[Floats, Floats, Floats | None]:
    """An axis of at least two values that starts at 0."""
    if axis[0] > 0:
        axis, before, after = np.concatenate([[0.0], axis]), 1, 0
    elif len(axis) == 1:
        axis, before, after = np.array([0.0, 1.0]), 0, 1
    else:
        return axis, times, reach

    def padded(block: Floats) -> Floats:
        return np.pad(block, [(before, after) if k == i else (0, 0) for k in range(block.ndim)], mode="edge")

    return axis, padded(times), padded(reach) if reach is not None and i < reach.ndim else reach


def _filled(times: Floats, axes: Sequence[Floats]) -> Floats:
    """Fill holes between measured points, those with the closest neighbours first."""
    times = times.copy()
    spans = [np.log2(np.maximum(axis, _half_of_smallest(axis))) for axis in axes]
    gaps, values = _between(times, axes, spans)
    for widest in (0.6, 1.1, 1.7, 2.1, 3.1, 5.1, math.inf):
        while (near := np.isfinite(values) & (gaps <= widest)).any():
            times[near] = values[near]
            gaps, values = _between(times, axes, spans)
    return times


def _half_of_smallest(axis: Floats) -> float:
    positive = axis[axis > 0]
    return float(positive[0]) / 2 if len(positive) else 1.0


def _between(times: Floats, axes: Sequence[Floats], spans: Sequence[Floats]) -> tuple[Floats, Floats]:
    """The smallest distance of neighbours around each hole (powers of two; infinite without), and the value between."""
    best, values = np.full(times.shape, math.inf), np.full(times.shape, math.nan)
    for i, (axis, span) in enumerate(zip(axes, spans, strict=True)):
        lanes = np.moveaxis(times, i, -1)
        before, after = _neighbours(lanes)
        *lane, place = enclosed = np.nonzero(np.isnan(lanes) & (before >= 0) & (after < len(axis)))
        low, high = before[enclosed], after[enclosed]
        at_low, at_high = lanes[(*lane, low)], lanes[(*lane, high)]
        value = at_low + (at_high - at_low) * (axis[place] - axis[low]) / (axis[high] - axis[low])
        gap = span[high] - span[low]
        best_of_lanes, values_of_lanes = np.moveaxis(best, i, -1), np.moveaxis(values, i, -1)  # views
        closer = gap < best_of_lanes[enclosed]
        cells = tuple(index[closer] for index in enclosed)
        best_of_lanes[cells], values_of_lanes[cells] = gap[closer], value[closer]
    return best, values


def _neighbours(lanes: Floats) -> tuple[Indices, Indices]:
    """Places on the last axis of the nearest known values before (-1: none) and after (its length: none)."""
    size = lanes.shape[-1]
    measured, places = ~np.isnan(lanes), np.arange(size)
    before = np.maximum.accumulate(np.where(measured, places, -1), axis=-1)
    after = np.minimum.accumulate(np.where(measured, places, size)[..., ::-1], axis=-1)[..., ::-1]
    return before, after


def _continued(times: Floats, axes: Sequence[Floats]) -> Floats:
    """Fill holes outside the measured points by continuing the last two, the last axis first, without falling."""
    for i in reversed(range(times.ndim)):
        lanes, axis = np.moveaxis(times, i, -1), axes[i]
        before, after = _neighbours(lanes)
        for place in range(1, len(axis)):
            last = before[..., place - 1]
            hole = np.isnan(lanes[..., place]) & (last == place - 1)
            at = lanes[..., place - 1]
            slope = 0.0 * at
            if place > 1:
                slope = (at - lanes[..., place - 2]) / (axis[place - 1] - axis[place - 2])
            step = np.maximum(np.nan_to_num(slope), 0.0) * (axis[place] - axis[place - 1])
            lanes[..., place] = np.where(hole, at + step, lanes[..., place])
            before, after = _neighbours(lanes)
        first = np.take_along_axis(lanes, np.minimum(after, len(axis) - 1), -1)
        lanes[...] = np.where(np.isnan(lanes), first, lanes)
    return times
