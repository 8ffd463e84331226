"""Grids: what lies between points, which neighbours fill a hole, and where measurements end."""

from __future__ import annotations

import math

import pytest

from latency_models.interpolation import Point, bracket, make_grid


def at(grid: object, *point: float) -> float:
    """Multilinear lookup, axis by axis."""
    block = grid.times  # type: ignore[attr-defined]
    for axis, x in zip(grid.axes, point, strict=True):  # type: ignore[attr-defined]
        i, share = bracket(axis, x)
        low, high = block[i], block[i + 1]
        block = _blend(low, high, share)
    return float(block)


def _blend(low: object, high: object, share: float) -> object:
    if isinstance(low, list) and isinstance(high, list):
        return [_blend(a, b, share) for a, b in zip(low, high, strict=True)]
    assert isinstance(low, float)
    assert isinstance(high, float)
    return low + (high - low) * share


def test_between_points_and_beyond_them_lines_are_straight() -> None:
    points: dict[Point, float] = {(a, b): 1.0 + 2 * a + 3 * b + a * b for a in (1, 4, 9) for b in (10, 20)}
    grid = make_grid(points, 1.0)
    assert grid.limits == (9.0, 20.0)
    assert grid.reach is None
    assert at(grid, 3, 17) == pytest.approx(1 + 6 + 51 + 51)
    assert at(grid, 20, 40) == pytest.approx(1 + 40 + 120 + 800)


def test_below_the_smallest_point_an_axis_is_flat() -> None:
    grid = make_grid({(4,): 7.0, (8,): 11.0}, 2.0)
    assert [at(grid, x) for x in (0, 2, 4, 6)] == [14.0, 14.0, 14.0, 18.0]


def test_a_single_point_is_a_constant() -> None:
    grid = make_grid({(0, 5): 3.0}, 1.0)
    assert at(grid, 0, 0) == at(grid, 0, 5) == at(grid, 1, 9) == 3.0


def test_holes_are_filled_from_the_closest_neighbours() -> None:
    """The hole at (4, 4) has neighbours twice as far along one axis as along the other; times tell which were used."""
    points: dict[Point, float] = {(a, b): 1.0 for a in (2, 4, 8) for b in (1, 4, 16)}
    del points[4, 4]
    points[2, 4] = points[8, 4] = 50.0
    grid = make_grid(points, 1.0)
    assert at(grid, 4, 4) == 50.0
    assert grid.reach is None


def test_interleaved_grids_join() -> None:
    """Two spacings, neither with the other's values on both axes: what is straight is found again everywhere."""
    coarse = [(a, b) for a in (2, 4, 8, 16) for b in (2, 4, 8, 16)]
    fine = [(a, b) for a in (4, 6, 9, 13.5) for b in (4, 6, 9, 13.5)]
    points: dict[Point, float] = {(a, b): 5 + 2 * a + b for a, b in coarse + fine}
    grid = make_grid(points, 1.0)
    for a in (2, 3, 5, 7, 9, 12, 16):
        for b in (2, 3, 5, 7, 9, 12, 16):
            assert at(grid, a, b) == pytest.approx(5 + 2 * a + b)


def test_a_corner_that_was_not_measured_continues_and_is_remembered() -> None:
    points: dict[Point, float] = {(n, kv): 1.0 + n * kv for n in (1, 2, 4) for kv in (10, 20, 40) if n * kv <= 80}
    grid = make_grid(points, 1.0)
    assert grid.axes == ([0.0, 1.0, 2.0, 4.0], [0.0, 10.0, 20.0, 40.0])
    assert grid.reach == [40.0, 40.0, 40.0, 20.0]
    assert at(grid, 4, 40) == pytest.approx(161.0)


def test_a_line_that_was_not_measured_at_all_continues_along_another_axis() -> None:
    points: dict[Point, float] = {
        (a, n, kv): float(10 * n + kv + a) for a in (1, 2) for n in (1, 2, 3) for kv in (5, 6)
    }
    for kv in (5, 6):
        del points[2, 3, kv]
    grid = make_grid(points, 1.0)
    assert at(grid, 2, 3, 6) == pytest.approx(38.0)
    assert grid.reach[2][3] == -1.0


def test_what_continues_never_falls() -> None:
    grid = make_grid({(1, 1): 5.0, (1, 2): 4.0, (1, 3): 3.0, (2, 1): 5.0, (2, 2): 4.0}, 1.0)
    assert at(grid, 2, 3) == 4.0
    assert not math.isnan(at(grid, 2, 2.5))
