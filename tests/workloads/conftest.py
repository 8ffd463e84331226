"""Public traces, and a way to judge a sample by its own sampling error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

SHARED_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SHARED_TRACES = SHARED_DATA / "traces"

Check = Callable[[npt.NDArray[np.generic], float, float], None]


@pytest.fixture
def public_trace() -> Callable[[str], Path]:
    """The path of a public trace; the test is skipped where the data folder is absent."""

    def find(name: str) -> Path:
        path = SHARED_TRACES / name
        if not path.exists():
            pytest.skip(f"{name} is not here")
        return path

    return find


@pytest.fixture
def p_value() -> Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], float]:
    """The p-value of a sample of indices under the given probabilities (chi-square).

    Indices of which fewer than five are expected are counted as one, so that the test keeps to what it claims.
    """

    def judge(sample: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
        expected = probabilities * len(sample)
        observed = np.bincount(sample, minlength=len(expected)).astype(np.float64)
        rare = expected < 5
        if rare.any():
            expected = np.append(expected[~rare], expected[rare].sum())
            observed = np.append(observed[~rare], observed[rare].sum())
        if not expected[-1]:
            assert not observed[-1], "something impossible was drawn"
            expected, observed = expected[:-1], observed[:-1]
        return float(chisquare(observed, expected).pvalue)

    return judge


@pytest.fixture
def assert_mean_and_cv() -> Check:
    """Checks a sample against the mean and the CV it should have, to within five standard errors of each.

    The standard error of the CV is that of its influence function, so it holds for any shape of distribution.
    """

    def check(sample: npt.NDArray[np.generic], mean: float, cv: float) -> None:
        x = sample.astype(np.float64)
        m, s = x.mean(), x.std()
        mean_error = s / np.sqrt(len(x))
        influence = ((x - m) ** 2 - s**2) / (2 * s * m) - s * (x - m) / m**2
        cv_error = influence.std() / np.sqrt(len(x))
        assert mean_error < 0.02 * mean, "the sample is too small to tell anything"
        assert cv_error < 0.05 * cv, "the sample is too small to tell anything"
        assert abs(m - mean) <= 5 * mean_error
        assert abs(s / m - cv) <= 5 * cv_error

    return check
