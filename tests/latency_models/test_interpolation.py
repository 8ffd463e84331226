"""Straight lines between measured points."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.interpolation import (
    Curve,
    Grid,
    Point,
    Surface,
    bracket,
    level,
    line_through,
    make_grid,
    weighted_sum,
)

POINTS = st.dictionaries(st.integers(1, 10**6), st.floats(1e-9, 1e3), min_size=1, max_size=8)
SIZES = st.floats(0, 2e6)


def multilinear(grid: Grid, *point: float) -> float:
    """Interpolation by its definition: a weighted sum over all corners of the cell, in exact fractions."""
    corners = [(Fraction(1), grid.times)]
    for axis, x in zip(grid.axes, point, strict=True):
        i = max(place for place in range(len(axis) - 1) if axis[place] <= x)
        low, high = Fraction(axis[i]), Fraction(axis[i + 1])
        share = (Fraction(x) - low) / (high - low)
        corners = [
            (weight * part, block[place])
            for weight, block in corners
            for part, place in ((1 - share, i), (share, i + 1))
        ]
    return float(sum(weight * Fraction(time) for weight, time in corners))


@pytest.mark.parametrize(
    ("x", "expected"), [(0, (0, 0.0)), (5, (0, 0.5)), (10, (1, 0.0)), (25, (1, 0.75)), (30, (1, 1.0)), (50, (1, 2.0))]
)
def test_bracket(x: float, expected: tuple[int, float]) -> None:
    assert bracket([0.0, 10.0, 30.0], x) == expected


@pytest.mark.parametrize(("x", "expected"), [(0, 2.0), (5, 2.0), (10, 3.0), (15, 4.0), (20, 4.0), (99, 4.0)])
def test_level_is_linear_between_points_and_constant_beyond(x: float, expected: float) -> None:
    assert level([5.0, 15.0], [2.0, 4.0], x) == expected


@given(st.tuples(st.floats(0, 100), st.floats(0, 100)), st.tuples(st.floats(101, 200), st.floats(0, 100)))
def test_a_line_goes_through_both_points(start: tuple[float, float], end: tuple[float, float]) -> None:
    assert line_through(start, end, start[0]) == start[1]
    assert line_through(start, end, end[0]) == pytest.approx(end[1], abs=1e-12)
    assert line_through(start, end, (start[0] + end[0]) / 2) == pytest.approx((start[1] + end[1]) / 2, abs=1e-9)


@pytest.mark.parametrize(
    ("points", "sizes", "expected"),
    [
        ([(10, 5.0), (2, 1.0), (4, 2.0)], (0, 2, 3, 4, 7, 10, 12), [1.0, 1.0, 1.5, 2.0, 3.5, 5.0, 6.0]),
        ([(1, 3.0), (2, 1.0)], (50,), [1.0]),  # it does not fall beyond its points
        ([(1, 1.0), (2, 4.0), (1, 3.0)], (1,), [2.0]),  # a size measured twice counts by its mean
        ([(7, 3.0)], (1, 100), [3.0, 3.0]),
    ],
)
def test_a_curve_is_straight_between_points_level_before_them_and_steady_beyond(
    points: list[tuple[float, float]], sizes: tuple[float, ...], expected: list[float]
) -> None:
    assert [Curve(points).at(size) for size in sizes] == expected


@given(POINTS, POINTS, SIZES, st.floats(0, 10))
def test_a_weighted_sum_is_the_sum_at_every_size(
    single: dict[int, float], another: dict[int, float], size: float, weight: float
) -> None:
    first, second = Curve(single.items()), Curve(another.items())
    total = weighted_sum([(weight, first), (2.0, second)])
    if size <= max(*single, *another):  # beyond that, a falling curve stays level while another may go on
        assert total.at(size) == pytest.approx(weight * first.at(size) + 2 * second.at(size), rel=1e-6, abs=1e-12)


@given(POINTS)
def test_a_curve_comes_back_from_its_document(points: dict[int, float]) -> None:
    curve = Curve(points.items())
    assert Curve.from_document(json.loads(json.dumps(curve.document()))) == curve


def test_a_surface_blends_the_curves_of_the_counts_around() -> None:
    """It is level before the first, goes on along the last two beyond the last, and never falls below 0."""
    surface = Surface({4: Curve([(0, 4.0), (10, 8.0)]), 2: Curve([(0, 2.0), (10, 2.0)])})
    assert [surface.at(count, 5) for count in (1, 2, 3, 4, 5)] == [2.0, 2.0, 4.0, 6.0, 8.0]
    assert Surface({1: Curve([(0, 5.0)]), 2: Curve([(0, 1.0)])}).at(9, 0) == 0.0


def test_a_surface_comes_back_from_its_document() -> None:
    surface = Surface({1: Curve([(0, 5.0)]), 2: Curve([(0, 1.0), (3, 4.0)])})
    assert Surface.from_document(json.loads(json.dumps(surface.document()))) == surface


def test_between_points_and_beyond_them_lines_are_straight() -> None:
    points: dict[Point, float] = {(a, b): 1.0 + 2 * a + 3 * b + a * b for a in (1, 4, 9) for b in (10, 20)}
    grid = make_grid(points, 1.0)
    assert grid.limits == (9.0, 20.0)
    assert grid.reach is None
    assert multilinear(grid, 3, 17) == pytest.approx(1 + 6 + 51 + 51)
    assert multilinear(grid, 20, 40) == pytest.approx(1 + 40 + 120 + 800)


def test_below_the_smallest_point_an_axis_is_flat() -> None:
    grid = make_grid({(4,): 7.0, (8,): 11.0}, 2.0)
    assert [multilinear(grid, x) for x in (0, 2, 4, 6)] == [14.0, 14.0, 14.0, 18.0]


def test_a_single_point_is_a_constant() -> None:
    grid = make_grid({(0, 5): 3.0}, 1.0)
    assert multilinear(grid, 0, 0) == multilinear(grid, 0, 5) == multilinear(grid, 1, 9) == 3.0


def test_holes_are_filled_from_the_closest_neighbours() -> None:
    """The hole at (4, 4) has neighbours twice as far along one axis as along the other; times tell which were used."""
    points: dict[Point, float] = {(a, b): 1.0 for a in (2, 4, 8) for b in (1, 4, 16)}
    del points[4, 4]
    points[2, 4] = points[8, 4] = 50.0
    grid = make_grid(points, 1.0)
    assert multilinear(grid, 4, 4) == 50.0
    assert grid.reach is None


def test_interleaved_grids_join() -> None:
    """Two spacings, neither with the other's values on both axes: what is straight is found again everywhere."""
    coarse = [(a, b) for a in (2, 4, 8, 16) for b in (2, 4, 8, 16)]
    fine = [(a, b) for a in (4, 6, 9, 13.5) for b in (4, 6, 9, 13.5)]
    points: dict[Point, float] = {(a, b): 5 + 2 * a + b for a, b in coarse + fine}
    grid = make_grid(points, 1.0)
    for a in (2, 3, 5, 7, 9, 12, 16):
        for b in (2, 3, 5, 7, 9, 12, 16):
            assert multilinear(grid, a, b) == pytest.approx(5 + 2 * a + b)


def test_a_corner_that_was_not_measured_continues_and_is_remembered() -> None:
    points: dict[Point, float] = {(n, kv): 1.0 + n * kv for n in (1, 2, 4) for kv in (10, 20, 40) if n * kv <= 80}
    grid = make_grid(points, 1.0)
    assert grid.axes == ([0.0, 1.0, 2.0, 4.0], [0.0, 10.0, 20.0, 40.0])
    assert grid.reach == [40.0, 40.0, 40.0, 20.0]
    assert multilinear(grid, 4, 40) == pytest.approx(161.0)


def test_a_line_that_was_not_measured_at_all_continues_along_another_axis() -> None:
    points: dict[Point, float] = {
        (a, n, kv): float(10 * n + kv + a) for a in (1, 2) for n in (1, 2, 3) for kv in (5, 6)
    }
    for kv in (5, 6):
        del points[2, 3, kv]
    grid = make_grid(points, 1.0)
    assert multilinear(grid, 2, 3, 6) == pytest.approx(38.0)
    assert grid.reach[2][3] == -1.0


def test_what_continues_never_falls() -> None:
    grid = make_grid({(1, 1): 5.0, (1, 2): 4.0, (1, 3): 3.0, (2, 1): 5.0, (2, 2): 4.0}, 1.0)
    assert multilinear(grid, 2, 3) == 4.0
    assert not math.isnan(multilinear(grid, 2, 2.5))
