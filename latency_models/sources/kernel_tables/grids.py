"""Grids of measured points without holes, so that a lookup is plain multilinear interpolation.

Profilers leave holes: between sub-grids of different spacing, and in corners that did not fit into memory. A hole is
filled by a straight line along the axis on which its measured neighbours are closest. Outside the measured points the
last two continue linearly; `Grid.reach` records where measurements ended.

Below its smallest value an axis is constant down to 0, since kernels compute whole tiles and read whole cache pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.fitting.estimator import Floats

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
