"""Straight lines between measured points."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.interpolation import Curve, Surface, bracket, level, line_through, weighted_sum

POINTS = st.dictionaries(st.integers(1, 10**6), st.floats(1e-9, 1e3), min_size=1, max_size=8)
SIZES = st.floats(0, 2e6)


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
