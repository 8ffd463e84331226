"""Intervals from several runs, and percentiles from weighted values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reports.metrics import spread, weighted_spread
from twin.serving.uncertainty import combine


def test_replications_alone_are_students_t() -> None:
    values = [3.0, 4.5, 2.5, 5.0]
    mean, intervals = combine([[{"ttft": {"mean": value}, "requests": 7} for value in values]])
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert mean == {"ttft": {"mean": pytest.approx(3.75)}, "requests": 7}
    assert intervals["ttft.mean"]["confidence"] == pytest.approx([low, high])
    reach = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) * np.sqrt(1 + 1 / 4)
    assert intervals["ttft.mean"]["prediction"] == pytest.approx([3.75 - reach, 3.75 + reach])


def test_one_run_has_no_interval() -> None:
    assert combine([[{"tpot": None, "requests": 3}]]) == ({"tpot": None, "requests": 3}, {})


def test_draws_with_replications_by_hand() -> None:
    """Draws of means 2 and 7 have the variance 12.5; replications within a draw 2 and 8, of which half is new.

    Student's t with one degree of freedom reaches 12.7062 standard errors.
    """
    mean, intervals = combine([[{"x": 1.0}, {"x": 3.0}], [{"x": 5.0}, {"x": 9.0}]])
    assert mean == {"x": 4.5}
    confidence, prediction = 12.7062 * np.sqrt(12.5 / 2), 12.7062 * np.sqrt(12.5 + 5 / 2 + 12.5 / 2)
    assert intervals["x"]["confidence"] == pytest.approx([4.5 - confidence, 4.5 + confidence], rel=1e-5)
    assert intervals["x"]["prediction"] == pytest.approx([4.5 - prediction, 4.5 + prediction], rel=1e-5)
    _, alone = combine([[{"x": 2.0}], [{"x": 7.0}]])
    prediction = 12.7062 * np.sqrt(12.5 + 12.5 / 2)
    assert alone["x"]["confidence"] == pytest.approx(intervals["x"]["confidence"])
    assert alone["x"]["prediction"] == pytest.approx([4.5 - prediction, 4.5 + prediction], rel=1e-5)


def test_counts_stay_whole_where_runs_agree() -> None:
    mean, intervals = combine([[{"requests": 7, "steps": 3, "tpot": None}, {"requests": 7, "steps": 4, "tpot": 1.0}]])
    assert mean == {"requests": 7, "steps": 3.5, "tpot": None}
    assert isinstance(mean["requests"], int)
    assert set(intervals) == {"requests", "steps"}


def test_prediction_intervals_cover_a_further_run_under_another_draw() -> None:
    """Draws shift all their replications together; 95 % of further runs, of further draws, must fall inside."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        shift = rng.normal(0, 1.0, 7)
        values = shift[:6, None] + rng.normal(0, 0.7, (6, 4))
        _, intervals = combine([[{"x": float(value)} for value in draw] for draw in values])
        low, high = intervals["x"]["prediction"]
        inside += low <= shift[6] + rng.normal(0, 0.7) <= high
    assert 0.92 <= inside / 1000 <= 0.99


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 5)), min_size=1, max_size=40))
def test_weights_are_repetitions(pairs: list[tuple[float, int]]) -> None:
    values, weights = np.array([v for v, _ in pairs]), np.array([w for _, w in pairs])
    plain = spread(np.repeat(values, weights))
    found = weighted_spread(values, weights)
    assert (plain is None) == (found is None)
    if plain is not None:
        assert found == pytest.approx(plain)
