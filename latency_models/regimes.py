"""Lines that hold only so far: where one α/β line does not fit, a knee is looked for and the line split there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from latency_models.base import Floats, Numbers
from latency_models.linear import CannotFit, LinearLatency

LEAST_POINTS = 3
"""Of a line."""

WORTH = 4.0
"""A split must leave at most this part of the squared residuals: two lines always fit somewhat better than one."""

CLOSE = 0.02
"""Median relative residual below which a line is not split: differences of this size are not told from noise."""


@dataclass(frozen=True)
class Regime:
    """One line and where it holds.

    Attributes:
        low, high: smallest and largest size that it was fitted to.
        median_residual: of |line - measured| / measured. worst_residual: the largest.
        fit: the estimator; None where times do not grow with size, and the line is the mean of the times.
    """

    low: float
    high: float
    alpha: float
    beta: float
    median_residual: float
    worst_residual: float
    fit: LinearLatency | None


def find_regimes(sizes: Numbers, times: Numbers, most: int = 4) -> list[Regime]:
    """One line, or several with knees between them, by size.

    A line whose median relative residual is above CLOSE is split where the squared relative residuals of two lines are
    the least, if that is at most 1/WORTH of what one line leaves, and each half again, up to `most` lines. Every line
    has at least LEAST_POINTS different sizes.

    Args:
        sizes, times: shape (n,), n ≥ 3, in any order.

    Raises:
        CannotFit: fewer than 3 different sizes.
    """
    x, t = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
    if len(np.unique(x)) < LEAST_POINTS:
        raise CannotFit("expected at least 3 different sizes", field="sizes", value=len(np.unique(x)))
    order = np.argsort(x, kind="stable")
    return _split(x[order], t[order], most)


def _split(x: Floats, t: Floats, most: int) -> list[Regime]:
    whole = _line(x, t)
    if most < 2 or whole.median_residual <= CLOSE:
        return [whole]
    different = np.unique(x)
    best, where = _squares(whole, x, t) / WORTH, 0.0
    for size in different[LEAST_POINTS : len(different) - LEAST_POINTS + 1]:
        below = x < size
        left = _squares(_line(x[below], t[below]), x[below], t[below])
        left += _squares(_line(x[~below], t[~below]), x[~below], t[~below])
        if left < best:
            best, where = left, float(size)
    if not where:
        return [whole]
    below = x < where
    first = _split(x[below], t[below], most - 1)
    return first + _split(x[~below], t[~below], most - len(first))


def _line(x: Floats, t: Floats) -> Regime:
    fit: LinearLatency | None = None
    try:
        fit = LinearLatency(relative=True).fit(x, t)
        alpha, beta = fit.alpha_, fit.beta_
    except CannotFit:  # times that fall as sizes grow: within noise, or a kernel that changes
        alpha, beta = 0.0, float(np.mean(t))
    residuals = np.abs(alpha * x + beta - t) / t
    return Regime(float(x[0]), float(x[-1]), alpha, beta, float(np.median(residuals)), float(np.max(residuals)), fit)


def _squares(line: Regime, x: Floats, t: Floats) -> float:
    return float((((line.alpha * x + line.beta) / t - 1) ** 2).sum())
