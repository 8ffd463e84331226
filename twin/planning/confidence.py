"""The probability that a deployment meets its goals over a span of time, from shorter windows of it.

A goal becomes an excess, a sum over the requests of a window: for "P99 at most x", the requests above x less 1 % of
all. The goal is met over a span exactly when the excesses of its windows sum to at most 0, so windows that are shorter
than the span suffice. A span has m windows; of R simulated ones the excesses have mean e and covariance S. The mean of
one more span then differs from e with covariance S·(1/m + 1/R), as Student's t with R - 1 degrees of freedom, since S
is itself estimated.

Errors of the step-time model do not vary between spans: a wrong step time is wrong in all of them. A draw of the model
shifts the mean excess, and the goals hold under it if they do in the long run. The confidence of a plan is the share of
draws under which they do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SAMPLES = 4096
"""Random spans of several goals."""


def met_under_draws(excess: Floats, shifts: Floats) -> NDArray[np.bool_]:
    """True for each draw of the step-time model under which all goals are met in the long run, shape (draws,).

    `excess`: shape (R, goals). `shifts`: of the mean excess by each draw, shape (draws, goals).
    """
    meets: NDArray[np.bool_] = (excess.mean(axis=0) + shifts <= 0).all(axis=1)
    return meets


def last_miss(misses: Callable[[int], bool], guess: int, places: int) -> int:
    """The last of some places that misses, if those before it do and the next two do not; -1 if none is seen to.

    `guess`: a place close behind it, from which the search gallops before it bisects.
    """
    low, place = -1, min(guess, places - 1)
    while True:
        high, step = places, 1
        while high - low > 1:
            low, high = (place, high) if misses(place) else (low, place)
            if low >= 0 and high < places:
                place = (low + high) // 2
            else:
                place = min(low + step, places - 1) if high == places else max(high - step, 0)
                step *= 2
        if high + 1 >= places or not misses(high + 1):
            return low
        low = place = high + 1


def probability(excess: Floats, windows: float, shifts: Floats | None = None) -> float:
    """Probability that a span meets all goals, a mean over draws of the step-time model where there are some.

    `excess`: shape (R, goals). `windows`: in a span, m. `shifts`: as of `met_under_draws`.
    """
    mean = excess.mean(axis=0)
    means = mean[None, :] if shifts is None else mean[None, :] + shifts
    count = len(excess)
    if count < 2:
        return float((means <= 0).all(axis=1).mean())
    scale = np.sqrt(1 / max(windows, 1e-9) + 1 / count)
    deviations = (excess - mean) / np.sqrt(count - 1)
    spread = np.sqrt((deviations**2).sum(axis=0)) * scale
    if len(mean) == 1 or int((spread > 0).sum()) <= 1:
        from scipy.special import stdtr  # slow to import

        with np.errstate(divide="ignore", invalid="ignore"):
            standard = np.where(spread > 0, -means / spread, np.where(means <= 0, np.inf, -np.inf))
        return float(np.prod(stdtr(count - 1, standard), axis=1).mean())
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((SAMPLES, count)) @ deviations
    noise = normal * (scale / np.sqrt(rng.chisquare(count - 1, SAMPLES) / (count - 1)))[:, None]
    return float(np.mean([(noise + row <= 0).all(axis=1).mean() for row in means]))


def p_value(excess: Floats, expected_misses: Floats) -> float:
    """The p-value of windows, for the hypothesis that a deployment misses some goal in the long run.

    The largest one over goals, since all must be met, of two tests of a mean excess of 0: Student's t-test, and for
    goals on percentiles a test of the count of misses, which come in clusters (`CLUSTERED`). Windows without a miss do
    not vary, and prove less than a t-test suggests.

    `excess`: shape (R, goals), of at least two windows. allowed: the misses of all windows together that just meet each
    goal; 0 for a goal that does not count misses.
    """
    from scipy.special import gammaincc, stdtr  # slow to import

    count = len(excess)
    mean, error = excess.mean(axis=0), excess.std(axis=0, ddof=1) / np.sqrt(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        standard = np.where(error > 0, mean / error, np.where(mean <= 0, -np.inf, np.inf))
    by_variation = stdtr(count - 1, standard)
    clusters = np.maximum(excess.sum(axis=0) + expected_misses, 0.0) / CLUSTERED
    by_count = np.where(
        expected_misses > 0, gammaincc(clusters + 1, expected_misses / CLUSTERED), 0.0
    )  # P(Poisson <= clusters)
    return float(np.maximum(by_variation, by_count).max())


def adjusted_p_value(value: float, attempt: int, looks: int) -> float:
    """A p-value, corrected for multiple tests.

    For any number of deployments, tested one after the other and each up to `looks` times, the probability that one
    which misses its goals gets a value below x is at most x: Σ 1/(k·(k + 1)) = 1.

    `attempt`: 1 for the first deployment that is tested.
    """
    return min(value * looks * attempt * (attempt + 1), 1.0)


CLUSTERED = 10.0
"""Misses come in clusters of this mean size: the variance of their count, relative to that of independent ones."""

CERTAIN = 3.5
"""Standard deviations beyond which one short window decides."""

LIKELY = 2.0
"""The same where several windows must agree, each under its own draw of the step times."""


def clearly_missed(excess: float, variance: float, beyond: float = CERTAIN) -> bool:
    """True if one window's excess is too large for a deployment that meets the goal.

    `variance`: of the excess of a deployment that just meets the goal, were its requests independent. `beyond`:
    standard deviations.
    """
    return excess > beyond * float(np.sqrt(CLUSTERED * variance))
