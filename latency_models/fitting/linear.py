"""The latency line t(x) = α·x + β (AFD 3.2, eq. 2-4), fitted by regression, with its uncertainty.

Where one line does not fit, `fit_piecewise` splits the sizes at a knee, and each side gets a line of its own.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from latency_models.fitting.estimator import (
    CannotFit,
    Estimator,
    Floats,
    Numbers,
    measurements,
    student_quantile,
)
from latency_models.io.config_io import Strict
from workloads.errors import BadInput

EXTREME = 1e100
"""The largest magnitude accepted, and the inverse of the smallest: squares beyond it overflow a float."""

ROUNDS = 5
"""Rounds of reweighting. Each shrinks the error of the weights by about the square of the relative noise."""


class LinearLatency(Estimator):
    """Least squares for t = α·x + β with β ≥ 0, else through the origin (`through_origin_`).

    `fit` sets the line; `covariance_` of (α, β); `noise_variance_` of one measurement (relative: over its mean) with
    `degrees_` of freedom; intervals by Student's t; `r_squared_`; `range_` and `points_`. `heldout_median_error_` is of
    |predicted - measured| / measured where every k-th different size is held out, k = 1/holdout, between the smallest
    and the largest; NaN for two sizes.

    `relative`: noise grows with the time: points weigh 1/t² of the fitted line, since measured times would favour
    points that came out short. `holdout`: share of the sizes, 0 to 0.5.
    """

    alpha_: float
    beta_: float

    def __init__(self, *, relative: bool = False, holdout: float = 0.2, confidence: float = 0.95) -> None:
        self.relative = relative
        self.holdout = holdout
        self.confidence = confidence

    def fit(self, sizes: Numbers, times: Numbers) -> Self:
        """Learn the line from sizes x and times t, both of shape (n,), n ≥ 3, in any order.

        Raises `CannotFit` for equal sizes, values out of range, a fitted α below 0, and settings out of theirs.
        """
        self._check_settings()
        x, t = measurements(sizes, times)
        if len(x) < 3:
            raise CannotFit("expected at least 3 points", field="sizes", value=len(x))
        _check_magnitudes(x, t)
        line = _reweighted(x, t, self.relative)
        if line.alpha < 0:
            raise CannotFit("expected times that do not fall as sizes grow", field="alpha", value=line.alpha)
        self._learn(line)
        self.range_ = (float(x.min()), float(x.max()))
        self.points_ = len(x)
        self.r_squared_ = _explained(x, t, line, self.relative)
        self.heldout_median_error_ = self._heldout_error(x, t)
        return self

    def predict(self, sizes: Numbers | float) -> Floats:
        """Times for sizes of any shape, in the unit that was fitted; `NotFitted` before `fit`."""
        self._require_fit()
        predicted: Floats = self.alpha_ * np.asarray(sizes, dtype=np.float64) + self.beta_
        return predicted

    def _check_settings(self) -> None:
        if not 0 <= self.holdout <= 0.5:
            raise CannotFit("expected a share from 0 to 0.5", field="holdout", value=self.holdout)
        if not 0 < self.confidence < 1:
            raise CannotFit("expected a number above 0 and below 1", field="confidence", value=self.confidence)

    def _learn(self, line: _Line) -> None:
        self.alpha_ = line.alpha
        self.beta_ = line.beta
        self.covariance_ = line.covariance
        self.noise_variance_ = line.noise
        self.degrees_ = line.degrees
        self.through_origin_ = line.through_origin
        reach = student_quantile(self.confidence, line.degrees) * np.sqrt(np.diag(line.covariance))
        self.alpha_interval_ = (line.alpha - float(reach[0]), line.alpha + float(reach[0]))
        self.beta_interval_ = (line.beta - float(reach[1]), line.beta + float(reach[1]))
        if line.through_origin:
            free = line.free_beta + student_quantile(self.confidence, line.degrees - 1) * line.free_deviation
            self.beta_interval_ = (0.0, max(0.0, free))

    def _heldout_error(self, x: Floats, t: Floats) -> float:
        different = np.unique(x)
        if self.holdout == 0 or len(different) < 3:
            return math.nan
        out = np.isin(x, different[1:-1][:: round(min(1 / self.holdout, len(different)))])
        line = _reweighted(x[~out], t[~out], self.relative)
        return float(np.median(np.abs(line.alpha * x[out] + line.beta - t[out]) / t[out]))


@dataclass(frozen=True, slots=True)
class _Line:
    """A fitted line. `noise` is the variance of a point of weight 1; `free_*` are β's estimate without β ≥ 0."""

    alpha: float
    beta: float
    covariance: Floats
    noise: float
    degrees: int
    through_origin: bool = False
    free_beta: float = 0.0
    free_deviation: float = 0.0


def _check_magnitudes(x: Floats, t: Floats) -> None:
    for time in (float(t.max()), float(t.min())):
        if not 1 / EXTREME <= time <= EXTREME:
            expected = f"expected numbers from {1 / EXTREME:g} to {EXTREME:g}"
            raise CannotFit(expected, field="times", value=time)
    if x.max() > EXTREME:
        raise CannotFit(f"expected numbers up to {EXTREME:g}", field="sizes", value=float(x.max()))
    if np.ptp(x) < 1 / EXTREME:
        raise CannotFit("expected sizes that differ, found one", field="sizes", value=float(x[0]))


def _reweighted(x: Floats, t: Floats, relative: bool) -> _Line:
    """The line with equal weights, or with 1/t², where t converges to the line's own value."""
    if not relative:
        return _solve(x, t, np.ones_like(t))
    line = _solve(x, t, 1 / t**2)
    for _ in range(ROUNDS):
        line = _solve(x, t, _relative_weights(x, t, line))
    return line


def _relative_weights(x: Floats, t: Floats, line: _Line) -> Floats:
    """The weights 1/fitted², bounded, so that no point far above the line gets an arbitrarily large weight."""
    weights: Floats = 1 / np.maximum(line.alpha * x + line.beta, t / 2) ** 2
    return weights


def _solve(x: Floats, t: Floats, weight: Floats) -> _Line:
    """Weighted least squares in centred and scaled sizes, so that sizes far from 0 lose no digits."""
    total, centre = float(weight.sum()), float(np.average(x, weights=weight))
    scale = float(np.abs(x - centre).max())
    z = (x - centre) / scale
    spread, level = float(weight @ z**2), float(np.average(t, weights=weight))
    slope = float((weight * z) @ (t - level)) / spread
    if abs(slope) <= 1e-13 * level:  # rounding, where the times are all alike
        slope = 0.0
    ratio = centre / scale
    beta = level - slope * ratio
    residual = t - level - slope * z
    degrees = max(len(x) - 2, 0)
    noise = float(weight @ residual**2) / degrees if degrees else math.nan
    of_slope, mixed = 1 / (spread * scale**2), -ratio / (spread * scale)
    of_level = 1 / total + ratio**2 / spread
    if beta < 0:
        return _solve_through_origin(x, t, weight, beta, math.sqrt(noise * of_level))
    covariance = noise * np.array([[of_slope, mixed], [mixed, of_level]])
    return _Line(slope / scale, beta, covariance, noise, degrees)


def _solve_through_origin(x: Floats, t: Floats, weight: Floats, free_beta: float, free_deviation: float) -> _Line:
    square = float(weight @ x**2)
    alpha = float((weight * x) @ t) / square
    noise = float(weight @ (t - alpha * x) ** 2) / (len(x) - 1)
    covariance = np.array([[noise / square, 0.0], [0.0, 0.0]])
    return _Line(alpha, 0.0, covariance, noise, len(x) - 1, True, free_beta, free_deviation)


def _explained(x: Floats, t: Floats, line: _Line, relative: bool) -> float:
    """The share R² of explained variance; 1 for times that are all equal and predicted exactly."""
    weight = _relative_weights(x, t, line) if relative else np.ones_like(t)
    residual, spread = t - line.alpha * x - line.beta, t - np.average(t, weights=weight)
    unexplained, total = float(weight @ residual**2), float(weight @ spread**2)
    if total <= 1e-24 * float(weight @ t**2):
        return 1.0
    return 1 - unexplained / total


MIN_POINTS = 3
"""Minimum number of different sizes of a line."""

MIN_GAIN = 4.0
"""A split must divide the squared residuals by at least this: two lines always fit somewhat better than one."""

TOLERANCE = 0.02
"""Median relative residual below which a line is not split: smaller residuals may be noise."""


@dataclass(frozen=True)
class LinePiece:
    """One line for sizes from `low` to `high`, with its relative residuals; without `fit`, the mean of the times."""

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
    single = _line(x, t)
    if max_pieces < 2 or single.median_residual <= TOLERANCE:
        return [single]
    different = np.unique(x)
    best, where = _squares(single, x, t) / MIN_GAIN, 0.0
    for size in different[MIN_POINTS : len(different) - MIN_POINTS + 1]:
        below = x < size
        squares = _squares(_line(x[below], t[below]), x[below], t[below])
        squares += _squares(_line(x[~below], t[~below]), x[~below], t[~below])
        if squares < best:
            best, where = squares, float(size)
    if not where:
        return [single]
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


class BrokenLine(Strict):
    """A line f with f(0) = 0, linear from knot to knot, seconds; beyond the last without falling."""

    knots: list[PositiveInt]
    values: list[NonNegativeFloat]

    @model_validator(mode="after")
    def _agrees(self) -> BrokenLine:
        if any(after <= before for before, after in itertools.pairwise(self.knots)):
            raise BadInput("expected rising numbers", field="knots", value=self.knots)
        if len(self.values) != len(self.knots):
            raise BadInput(f"expected a value for each of {len(self.knots)} knots", field="values", value=self.values)
        return self

    def at(self, x: float) -> float:
        """The value f(x)."""
        knots, values = self.knots, self.values
        if not knots:
            return 0.0
        i = min(bisect_left(knots, x), len(knots) - 1)
        before_x, before_y = (knots[i - 1], values[i - 1]) if i else (0, 0.0)
        slope = (values[i] - before_y) / (knots[i] - before_x)
        if x > knots[i]:
            return values[i] + max(slope, 0.0) * (x - knots[i])
        return before_y + slope * (x - before_x)

    def scaled(self, factor: float, beyond: float = 1.0) -> BrokenLine:
        """The line times a factor; its slope beyond the last knot, up to 1000 times as far, times `beyond` as well."""
        if not self.knots:
            return self
        far = 1000 * self.knots[-1]
        end = self.values[-1] + beyond * (self.at(far) - self.values[-1])
        return BrokenLine(knots=[*self.knots, far], values=[factor * value for value in (*self.values, end)])


def choose_knots(column: Floats, support: int, dense: int) -> list[int]:
    """Sizes at which a broken line may bend: every number up to `dense`, then 1, 2, 3, 4, 6, 8, 12, …

    The last knot is the largest size, (n,). Each piece of the line has at least `support` points.
    """
    above = np.sort(column[column > 0])
    if not len(above):
        return []
    largest, covered = int(above[-1]), 0
    octaves = (1 << i for i in range(largest.bit_length()))
    knots: list[int] = []
    for knot in sorted({*range(1, dense + 1), *(size for octave in octaves for size in (octave, octave * 3 // 2))}):
        below = int(np.searchsorted(above, knot, side="right"))
        if knot < largest and below - covered >= support:
            knots.append(knot)
            covered = below
    if knots and len(above) - covered < support:
        knots.pop()
    return [*knots, largest]


def basis(column: Floats, knots: Sequence[int], dense: int) -> list[Floats]:
    """Basis functions of a broken line at some sizes, one column of shape (n,) for each knot.

    Up to `dense` they are levels: 1 at the knot, falling to 0 at the next on either side; the last stays 1 beyond. From
    there on they are rises: how far along its piece a size lies, 0 to 1, and beyond the last knot further.
    """
    levels = [knot for knot in knots if knot <= dense]
    columns: list[Floats] = [np.interp(column, [0, *levels], unit) for unit in np.eye(len(levels) + 1)[1:]]
    for before, knot in itertools.pairwise([*(levels[-1:] or [0]), *knots[len(levels) :]]):
        share = (column - before) / (knot - before)
        columns.append(np.maximum(share, 0.0) if knot == knots[-1] else np.clip(share, 0.0, 1.0))
    return columns


def from_basis(knots: list[int], amounts: Sequence[float], dense: int) -> BrokenLine:
    """The broken line with these amounts of its basis functions."""
    columns = basis(np.array(knots, float), knots, dense)
    values = sum((amount * column for amount, column in zip(amounts, columns, strict=True)), np.zeros(len(knots)))
    return BrokenLine(knots=knots, values=values.tolist())
