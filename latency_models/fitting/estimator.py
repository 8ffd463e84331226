"""Base class and checks of estimators, in scikit-learn's manner, and statistics of their errors.

The constructor stores its arguments under their own names, without checks. `fit` checks them, sets attributes that end
in an underscore, and returns the estimator. Methods that predict raise `NotFitted` before `fit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from workloads.errors import BadInput, TwinError

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Sequence[float] | NDArray[np.float64] | NDArray[np.int64]


class CannotFit(BadInput):
    """Raised for measurements, or settings of an estimator, that do not allow a fit."""


class NotFitted(TwinError, AttributeError):
    """Raised when an estimator predicts before `fit`."""


class Estimator:
    """Base class of estimators."""

    def _require_fit(self) -> None:
        if not any(name.endswith("_") and not name.startswith("_") for name in vars(self)):
            raise NotFitted(f"expected {type(self).__name__} to be fitted before it predicts")


def measurements(sizes: Numbers, times: Numbers) -> tuple[Floats, Floats]:
    """Checked copies of sizes (at least 0) and times (above 0), as float64 arrays of shape (n,)."""
    x, t = _flat(sizes, "sizes"), _flat(times, "times")
    if len(x) != len(t):
        raise CannotFit(f"expected as many times as sizes ({len(x)})", field="times", value=len(t))
    for name, column, fits in (("sizes", x, x >= 0), ("times", t, t > 0)):
        wrong = np.flatnonzero(~(np.isfinite(column) & fits))
        if len(wrong):
            at = int(wrong[0])
            bound = "0 or more" if name == "sizes" else "above 0"
            raise CannotFit(f"expected a finite number, {bound}", field=f"{name}[{at}]", value=float(column[at]))
    return x, t


def _flat(values: Numbers, name: str) -> Floats:
    try:
        column = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise CannotFit("expected a flat list of numbers", field=name, value=values) from None
    if column.ndim != 1:
        raise CannotFit("expected a flat list of numbers", field=name, value=f"an array of shape {column.shape}")
    return column


def student_quantile(confidence: float, degrees: float) -> float:
    """Two-sided quantile of Student's t; NaN without degrees of freedom."""
    if degrees <= 0:
        return math.nan
    from scipy.special import stdtrit  # slow to import, and only a fit needs it

    return float(stdtrit(degrees, 0.5 + confidence / 2))


def deviation_between(groups: Sequence[Floats]) -> float:
    """Standard deviation of what the members of a group have in common: a_i in x_ij = μ + a_i + ε_ij.

    By the method of moments: the variance of the groups' means, less the part that the scatter within groups explains.
    Groups may be of different sizes. 0 if the scatter explains all of it, and for fewer than two groups.

    Args:
        groups: each of shape (n_i,); groups of one member are left out.
    """
    several = [group for group in groups if len(group) > 1]
    if len(several) < 2:
        return 0.0
    means = np.array([group.mean() for group in several])
    explained = np.mean([group.var(ddof=1) / len(group) for group in several])
    return float(np.sqrt(max(means.var(ddof=1) - explained, 0.0)))


@dataclass(frozen=True)
class HuberFit:
    """Coefficients of at least 0 by reweighted least squares with Huber's loss.

    Attributes:
        coefficients: shape (k,).
        scaled: the design over its columns' maxima, shape (n, k). scale: these maxima, over the unit of the times.
        residual: shape (n,). threshold: the residual from which the loss is linear.
    """

    coefficients: Floats
    scaled: Floats
    scale: Floats
    residual: Floats
    threshold: float

    @property
    def covariance(self) -> Floats:
        """Covariance of the coefficients, shape (k, k); 0 for those that are 0.

        It is the sandwich of an M-estimate (Huber 1967): it holds whether or not long steps scatter more.
        """
        count, size = self.scaled.shape
        free = self.coefficients > 0
        inside = self.scaled[np.abs(self.residual) <= self.threshold][:, free]
        pulls = self.scaled[:, free] * np.clip(self.residual, -self.threshold, self.threshold)[:, None]
        bread = np.linalg.pinv(inside.T @ inside)
        spare = count / max(count - int(free.sum()), 1)  # as many degrees of freedom as the coefficients leave
        covariance = np.zeros((size, size))
        covariance[np.ix_(free, free)] = spare * bread @ (pulls.T @ pulls) @ bread
        return covariance / np.outer(self.scale, self.scale)


def fit_huber(design: Floats, times: Floats, tuning: float, *, relative: bool = False) -> HuberFit:
    """Fit times by the columns of a design.

    Args:
        design: shape (n, k), at least 0. times: shape (n,).
        tuning: residuals further than this many deviations off count by their distance, not by its square.
        relative: residuals are relative to what is expected, not to what was measured: of equal steps the fast ones
            would weigh more.
    """
    from scipy.optimize import nnls  # slow to import, and only a fit needs it

    scale = design.max(axis=0)
    scale[scale == 0] = 1.0
    unit = 1.0 if relative else float(np.median(np.abs(times))) or 1.0
    x, t, weight = design / scale, times / unit, np.ones(len(times))
    expected = t if relative else np.ones(len(times))
    for _ in range(30 if relative else 50):
        root = np.sqrt(weight) / expected
        solution = nnls(x * root[:, None], t * root)[0]
        residual = t - x @ solution
        if relative:
            expected = np.maximum(x @ solution, 1e-3 * t)
            residual = t / expected - 1
        deviation = max(1.4826 * float(np.median(np.abs(residual))), 1e-12)
        weight = np.minimum(1.0, tuning * deviation / np.maximum(np.abs(residual), 1e-300))
    return HuberFit(solution * unit / scale, x, scale / unit, residual, tuning * deviation)
