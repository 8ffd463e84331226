"""Interpolation between measured points: on one axis, on two, and the parts that grids of more axes need.

Everything in this package that interpolates does it here, with one exception: `EcTables` calls
`schedulers.step_policies.interpolate`, so that its step times equal those that the SLO scheduler computes, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


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
