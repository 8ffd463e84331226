from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from workloads.lengths import REACH, upper_tail


def test_it_agrees_with_scipy_over_the_whole_reach() -> None:
    z = np.linspace(-REACH, REACH, 1_000_003)
    exact = ndtr(-z)
    assert np.abs(upper_tail(z) - exact).max() < 1e-15
    assert (np.abs(upper_tail(z) - exact) / exact).max() < 1e-12


def test_it_is_exact_on_and_halfway_between_knots() -> None:
    z = np.arange(-64, 65) / 64
    assert np.abs(upper_tail(z) - ndtr(-z)).max() < 2.3e-16


def test_points_beyond_reach_are_taken_at_reach() -> None:
    tail = upper_tail(np.array([-np.inf, -40.0, 40.0, np.inf]))
    assert tail.tolist() == upper_tail(np.array([-REACH, -REACH, REACH, REACH])).tolist()
    assert 0 < tail[-1] < 2e-19


def test_the_shape_is_kept_and_the_input_untouched() -> None:
    z = np.array([[0.0, 50.0]])
    assert upper_tail(z).shape == (1, 2)
    assert z.tolist() == [[0.0, 50.0]]
    assert upper_tail(np.array([])).shape == (0,)
