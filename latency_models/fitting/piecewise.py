"""Piecewise lines: if one α/β line does not fit, sizes are split at a knee and each side gets a line of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from latency_models.fitting.estimator import Floats, Numbers
from latency_models.fitting.linear import CannotFit, LinearLatency

MIN_POINTS = 3
"""Minimum number of different sizes of a line."""

MIN_GAIN = 4.0
"""A split must divide the squared residuals by at least this: two lines always fit somewhat better than one."""

TOLERANCE = 0.02
"""Median relative residual below which a line is not split: smaller residuals may be noise."""


@dataclass(frozen=True)
class LinePiece:
    """One line, and the sizes for which it holds.

    Attributes:
        low, high: smallest and largest size of its points.
        alpha, beta: the line.
        median_residual, worst_residual: median and maximum of |line - measured| / measured.
        fit: the estimator; None where times do not grow with size, and the line is the mean of the times.
    """

    low: float
    high: float
    alpha: float
    beta: float
    median_residual: float
    worst_residual: float
    fit: LinearLatency | None


def fit_piecewise(sizes: Numbers, times: Numbers, max_pieces: int = 4) -> list[LinePiece]:
    """Fit one line, or several with knees between them, in the order of their sizes.

    A line whose median relative residual is above TOLERANCE is split where two lines leave the smallest sum of squared
    relative residuals, provided that is at most 1/MIN_GAIN of what one line leaves. Each half may be split again, up to
    `max_pieces` lines. Every line has at least MIN_POINTS different sizes.

    Args:
        sizes, times: shape (n,), n ≥ 3, in any order.
    """
    x, t = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
    if len(np.unique(x)) < MIN_POINTS:
        raise CannotFit("expected at least 3 different sizes", field="sizes", value=len(np.unique(x)))
    order = np.argsort(x, kind="stable")
    return _split(x[order], t[order], max_pieces)


def _split(x: Floats, t: Floats, max_pieces: int) -> list[LinePiece]:
    whole = _line(x, t)
    if max_pieces < 2 or whole.median_residual <= TOLERANCE:
        return [whole]
    different = np.unique(x)
    best, where = _squares(whole, x, t) / MIN_GAIN, 0.0
    for size in different[MIN_POINTS : len(different) - MIN_POINTS + 1]:
        below = x < size
        left = _squares(_line(x[below], t[below]), x[below], t[below])
        left += _squares(_line(x[~below], t[~below]), x[~below], t[~below])
        if left < best:
            best, where = left, float(size)
    if not where:
        return [whole]
    below = x < where
    first = _split(x[below], t[below], max_pieces - 1)
    return first + _split(x[~below], t[~below], max_pieces - len(first))


def _line(x: Floats, t: Floats) -> LinePiece:
    fit: LinearLatency | None = None
    try:
        fit = LinearLatency(relative=True).fit(x, t)
        alpha, beta = fit.alpha_, fit.beta_
    except CannotFit:  # times that fall as sizes grow: within noise, or a kernel that changes
        alpha, beta = 0.0, float(np.mean(t))
    residuals = np.abs(alpha * x + beta - t) / t
    return LinePiece(float(x[0]), float(x[-1]), alpha, beta, float(np.median(residuals)), float(np.max(residuals)), fit)


def _squares(line: LinePiece, x: Floats, t: Floats) -> float:
    return float((((line.alpha * x + line.beta) / t - 1) ** 2).sum())
