"""Variation between groups, apart from the scatter within them."""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.fitting.estimator import deviation_between
from reports.metrics import student_quantile


def rounds(rng: np.random.Generator, between: float, within: float, count: int = 30) -> list[np.ndarray]:
    """Rounds of 20 to 60 steps, each with an effect of its own."""
    sizes = rng.integers(20, 61, count)
    return [rng.normal(0, between) + within * rng.standard_normal(size) for size in sizes]


def test_two_groups_by_hand() -> None:
    """Means 1 and 5 have a variance of 8; scatter explains the mean of 2/2 and 8/2, which is 2.5."""
    assert deviation_between([np.array([0.0, 2.0]), np.array([3.0, 7.0])]) == pytest.approx(5.5**0.5)


@pytest.mark.parametrize("between", [0.01, 0.03, 0.1])
def test_the_variance_between_rounds_is_found_on_average(between: float) -> None:
    rng = np.random.default_rng(1)
    result = [deviation_between(rounds(rng, between, 0.03)) ** 2 for _ in range(400)]
    assert np.mean(result) == pytest.approx(between**2, rel=0.06)


def test_another_round_lies_in_its_interval_as_often_as_it_says() -> None:
    """Student's t with as many degrees of freedom as rounds less one, 95 % of 2,000 further rounds."""
    rng, count = np.random.default_rng(2), 12
    reach, covered = student_quantile(0.95, count - 1), 0
    for _ in range(2000):
        expected = rounds(rng, 0.03, 0.02, count)
        centre = np.mean([item.mean() for item in expected])
        covered += abs(rng.normal(0, 0.03) - centre) <= reach * deviation_between(expected) * (1 + 1 / count) ** 0.5
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_scatter_alone_is_no_variation_between_rounds() -> None:
    rng = np.random.default_rng(3)
    assert np.mean([deviation_between(rounds(rng, 0.0, 0.03)) for _ in range(200)]) < 0.03 / 40**0.5 / 2


@pytest.mark.parametrize("groups", [[], [np.array([1.0, 2.0])], [np.array([1.0]), np.array([5.0])]])
def test_fewer_than_two_groups_vary_by_nothing_that_is_known(groups: list[np.ndarray]) -> None:
    assert deviation_between(groups) == 0.0
