"""Lines are split where they have a knee, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.fitting.estimator import CannotFit
from latency_models.fitting.linear import fit_piecewise

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_a_line_stays_one_line_under_noise() -> None:
    generator = np.random.default_rng(4)
    times = [(3e-6 * x + 2e-5) * generator.normal(1, 0.01) for x in SIZES]
    (line,) = fit_piecewise(SIZES, times)
    assert line.alpha == pytest.approx(3e-6, rel=0.02)
    assert line.beta == pytest.approx(2e-5, rel=0.02)
    assert (line.low, line.high) == (1, 512)
    assert line.fit is not None


def test_a_knee_is_found_where_it_is() -> None:
    """Flat while weights are read, then by the token: max(50, 2·x) µs, which turns at 25."""
    (flat, rising) = fit_piecewise(SIZES, [max(50.0, 2.0 * x) for x in SIZES])
    assert (flat.low, flat.high) == (1, 16)
    assert (flat.alpha, flat.beta) == (0.0, pytest.approx(50.0))
    assert (rising.low, rising.high) == (32, 512)
    assert rising.alpha == pytest.approx(2.0)
    assert rising.beta == pytest.approx(0.0, abs=1e-6)


def test_two_knees_and_a_step() -> None:
    sizes = list(range(1, 25))
    times = [10.0 + x if x < 9 else 40.0 + x if x < 17 else 100.0 + 3 * x for x in sizes]
    lines = fit_piecewise(sizes, times)
    assert [(line.low, line.high) for line in lines] == [(1, 8), (9, 16), (17, 24)]
    assert max(line.worst_residual for line in lines) < 1e-9


def test_what_does_not_hold_is_told() -> None:
    (line,) = fit_piecewise([1, 2, 3, 4], [1.0, 3.0, 1.0, 3.0], max_pieces=1)
    assert line.worst_residual > 0.3


def test_times_that_fall_make_a_level() -> None:
    (line,) = fit_piecewise([1, 2, 3], [1.02, 1.01, 1.0])
    assert (line.alpha, line.fit) == (0.0, None)
    assert line.beta == pytest.approx(1.01)


def test_too_few_sizes() -> None:
    with pytest.raises(CannotFit, match="3 different sizes"):
        fit_piecewise([1, 1, 2], [1.0, 1.0, 2.0])
