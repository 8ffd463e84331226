"""The probability that a span meets its goals is as often right as it says."""

from __future__ import annotations

import numpy as np
import pytest

from twin.planning.confidence import clearly_missed, probability


@pytest.mark.parametrize("windows", [1, 5])
def test_windows_without_variation_leave_no_doubt(windows: int) -> None:
    assert probability(np.array([[-2.0, -1.0]] * windows), 10.0) == 1.0
    assert probability(np.array([[-2.0, 1.0]] * windows), 10.0) == 0.0


@pytest.mark.parametrize("goals", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_claim_is_the_frequency(goals: int) -> None:
    """A share p of new spans meets the goals where a deployment is said to meet them with chance p."""
    rng = np.random.default_rng(7)
    spread, windows, count = 4.0, 6, 8
    claims, outcomes = [], []
    for _ in range(4000):
        mean = rng.uniform(-12, 12, goals)
        claims.append(probability(rng.normal(mean, spread, (count, goals)), windows))
        outcomes.append((rng.normal(mean, spread, (windows, goals)).sum(axis=0) <= 0).all())
    claimed, observed = np.array(claims), np.array(outcomes)
    for low, high in ((0.05, 0.3), (0.3, 0.7), (0.7, 0.95), (0.95, 0.999)):
        rows = (claimed > low) & (claimed <= high)
        expected = claimed[rows].mean()
        error = np.sqrt(expected * (1 - expected) / rows.sum())
        assert rows.sum() > 50
        assert abs(observed[rows].mean() - expected) < 3.5 * error, (low, high)


def test_more_windows_in_a_span_make_a_likely_outcome_more_certain() -> None:
    excess = np.random.default_rng(1).normal(-1.0, 2.0, (12, 1))
    chances = [probability(excess, windows) for windows in (1, 4, 64)]
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


def test_errors_of_the_model_lower_the_confidence() -> None:
    excess = np.random.default_rng(1).normal(-3.0, 1.0, (10, 1))
    sure = probability(excess, 10.0)
    shifted = probability(excess, 10.0, np.array([[-4.0], [0.0], [8.0], [0.0]]))
    assert sure > 0.99
    assert 0.7 < shifted < 0.8  # one draw of four misses


def test_a_short_window_speaks_only_where_it_is_clear() -> None:
    independent = 1000 * 0.01 * 0.99
    assert not clearly_missed(15.0, independent)
    assert clearly_missed(60.0, independent)
