"""Scores from durations: the linear case against its closed form, common noise, and what cannot be told apart."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from twin.refinement.posterior import Observations, Posterior, estimate, log_mean_factor

Floats = NDArray[np.float64]


def observed(measured: Floats, begin: Floats | None = None, length: float = 0.5) -> Observations:
    begin = np.arange(len(measured), dtype=float) if begin is None else begin
    kinds = np.zeros(len(measured), dtype=np.int64)
    return Observations(measured, kinds, begin, begin + length, np.full(len(measured), 1e-4))


def linear(design: Floats, measured: Observations) -> Posterior:
    return estimate(measured, lambda s: (design @ s, design), design.shape[1])


def test_a_linear_model_has_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    design, truth = 0.1 * rng.standard_normal((60, 3)), np.array([1.0, -0.5, 0.2])
    posterior = linear(design, observed(design @ truth + 0.02 * rng.standard_normal(60)))
    (noise, shared) = posterior.noise[0]
    covariance = np.linalg.inv(design.T @ design / (noise**2 + 1e-8) + np.eye(3))
    assert (noise, shared) == (pytest.approx(0.02, rel=0.35), pytest.approx(shared))
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-6)
    assert posterior.estimate == pytest.approx(truth, abs=0.3)
    assert [posterior.verdict(i) for i in range(3)] == ["learned"] * 3


def test_equal_columns_are_tied_and_an_absent_one_is_not_seen() -> None:
    rng = np.random.default_rng(1)
    column = rng.uniform(0.5, 1.5, 50)
    design = np.stack([0.04 * column, 0.04 * column, np.zeros(50), 0.1 * rng.standard_normal(50)], axis=1)
    posterior = linear(design, observed(design @ np.array([1.0, 1.0, 1.0, 1.0]) + 0.004 * rng.standard_normal(50)))
    assert [posterior.verdict(i) for i in range(4)] == ["tied", "tied", "not seen", "learned"]
    assert (posterior.tied(0), posterior.tied(1), posterior.tied(2)) == ([1], [0], [])
    assert posterior.estimate[:2].sum() == pytest.approx(2.0, abs=0.2)
    assert posterior.left[2] == pytest.approx(1.0)


def test_intervals_in_common_are_fewer_witnesses() -> None:
    """Sixty requests that were disturbed together say less than sixty others with residuals of that size."""
    rng = np.random.default_rng(2)
    begin = np.sort(rng.uniform(0, 100, 60))
    design = np.full((60, 1), 0.05)
    places = np.arange(0, 160)
    together: list[float] = []
    apart: list[float] = []
    for seed in range(40):
        noise = 0.05 * np.random.default_rng(seed).standard_normal(len(places))
        disturbed = np.array([noise[int(at) : int(at) + 40].mean() for at in begin])
        for length, misses in ((40.0, together), (1e-6, apart)):
            posterior = linear(design, observed(disturbed, begin, length))
            misses.append(float(posterior.estimate[0] / posterior.left[0]))
    assert np.std(apart) > 2.5
    assert np.std(together) < 1.5


def test_a_curved_model_is_found_by_several_steps() -> None:
    weights = np.linspace(0.5, 2.0, 40)

    def predict(scores: Floats) -> Floats:
        return np.log1p(weights * np.exp(0.8 * scores[0]))

    def linearise(scores: Floats) -> tuple[Floats, Floats]:
        odds = weights * np.exp(0.8 * scores[0])
        return np.log1p(odds), (0.8 * odds / (1 + odds))[:, None]

    measured = predict(np.array([1.7]))
    posterior = estimate(observed(measured + 1e-3 * np.random.default_rng(3).standard_normal(40)), linearise, 1)
    assert posterior.estimate[0] == pytest.approx(1.7, abs=0.02)
    assert posterior.rounds > 1


def test_the_factor_to_means_and_its_deviation_hold_for_spells_of_slow_steps() -> None:
    """Spells of ten steps of which a tenth take four times as long: neighbours are no independent witnesses."""
    rng = np.random.default_rng(4)
    steps = rng.uniform(0.01, 0.03, 2000)
    factors = [
        log_mean_factor(steps * np.repeat(np.where(rng.random(200) < 0.1, 4.0, 1.0), 10), steps * 4**0.1)
        for _ in range(300)
    ]
    errors, deviations = np.array(factors).T
    errors -= np.log(1.3 / 4**0.1)
    assert abs(errors.mean()) < 0.005
    assert np.mean(np.abs(errors) < 1.96 * deviations) > 0.93
