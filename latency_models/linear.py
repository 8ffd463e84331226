"""The α/β latency line t(x) = α·x + β (AFD 3.2, eq. 2-4), fitted by regression, with what is known of its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from workloads.errors import TwinError

Floats = NDArray[np.float64]


class CannotFit(TwinError, ValueError):
    """Measurements that no line can be fitted to."""


class NotFitted(TwinError, AttributeError):
    """An estimator was asked to predict before it was fitted."""


class LinearLatency:
    """Least squares for t = α·x + β.

    The constructor only stores. `fit` learns, from all points, `alpha_`, `beta_`, `covariance_` (2 × 2, of α and β),
    `alpha_interval_`, `beta_interval_` (Student's t), `r_squared_`, `range_` (smallest and largest x) and `points_`;
    and `heldout_median_error_`: the median of |predicted − measured| / measured over every k-th point in order of x
    (k = 1/holdout, the ends excepted), predicted by a line fitted to the others. Points are chosen by their order, so
    no seed is needed.

    Args:
        relative: weigh each point by 1/t, so that errors count in proportion. Kernel timings span decades and their
            noise grows with them; without weights the longest decide alone.
        holdout: share of the points held out for the error estimate.
        confidence: of the intervals.
    """

    alpha_: float
    beta_: float

    def __init__(self, *, relative: bool = False, holdout: float = 0.2, confidence: float = 0.95) -> None:
        self.relative, self.holdout, self.confidence = relative, holdout, confidence

    def get_params(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"relative": self.relative, "holdout": self.holdout, "confidence": self.confidence}

    def fit(self, sizes: Sequence[float] | Floats, times: Sequence[float] | Floats) -> Self:
        """Learn the line from sizes x and times t, both of shape (n,), n ≥ 3.

        Raises:
            CannotFit: fewer than 3 points, lengths that differ, a value that is not finite, a time that is not above 0,
                sizes that are all alike, or a fitted α below 0.
        """
        x, t = _checked(sizes, times)
        alpha, beta, inverse, noise = self._solve(x, t)
        if alpha < 0:
            raise CannotFit(f"expected times that grow with size; the fitted alpha is {alpha:.6g}")
        self.alpha_, self.beta_, self.points_ = alpha, beta, len(x)
        self.range_ = (float(x.min()), float(x.max()))
        self.covariance_ = noise * inverse
        self._noise, self._inverse = noise, inverse
        reach = _student(self.confidence, len(x) - 2) * np.sqrt(np.diag(self.covariance_))
        self.alpha_interval_ = (alpha - float(reach[0]), alpha + float(reach[0]))
        self.beta_interval_ = (beta - float(reach[1]), beta + float(reach[1]))
        residual, spread = t - (alpha * x + beta), t - t.mean()
        total = float(spread @ spread)
        self.r_squared_ = 1 - float(residual @ residual) / total if total > 0 else 1.0
        self.heldout_median_error_ = self._heldout_error(x, t)
        return self

    def predict(self, sizes: Sequence[float] | Floats) -> Floats:
        """Times for sizes of any shape.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        predicted: Floats = self.alpha_ * np.asarray(sizes, dtype=np.float64) + self.beta_
        return predicted

    def seconds(self, size: float) -> float:
        """`predict` for one size, without arrays: the hot path of a simulation. In the unit that was fitted."""
        try:
            return self.alpha_ * size + self.beta_
        except AttributeError:
            raise NotFitted("fit before predicting") from None

    def interval(self, sizes: Sequence[float] | Floats) -> tuple[Floats, Floats]:
        """The interval that a further measurement at each size falls into with the given confidence."""
        self._require_fit()
        x = np.asarray(sizes, dtype=np.float64)
        centre = self.predict(x)
        design = np.stack((x, np.ones_like(x)), axis=-1)
        line = np.einsum("...i,ij,...j->...", design, self._inverse, design)
        own = centre**2 if self.relative else np.ones_like(centre)
        reach = _student(self.confidence, self.points_ - 2) * np.sqrt(self._noise * (line + own))
        return centre - reach, centre + reach

    def in_range(self, size: float) -> bool:
        """Whether a size lies within what was measured."""
        self._require_fit()
        return self.range_[0] <= size <= self.range_[1]

    def _solve(self, x: Floats, t: Floats) -> tuple[float, float, Floats, float]:
        """α, β, (XᵀWX)⁻¹ and the variance of a point of weight 1."""
        weight = 1 / t**2 if self.relative else np.ones_like(t)
        # Centred and scaled, so that sizes far from 0 lose no digits.
        centre = float(np.average(x, weights=weight))
        scale = float(np.abs(x - centre).max())
        z = (x - centre) / scale
        total, spread = float(weight.sum()), float(weight @ z**2)
        level = float(weight @ t) / total
        slope = float((weight * z) @ (t - level)) / spread
        alpha, beta = slope / scale, level - slope * centre / scale
        residual = t - (level + slope * z)
        noise = float(weight @ residual**2) / (len(x) - 2)
        ratio = centre / scale
        inverse = np.array(
            [
                [1 / (spread * scale**2), -ratio / (spread * scale)],
                [-ratio / (spread * scale), 1 / total + ratio**2 / spread],
            ]
        )
        return alpha, beta, inverse, noise

    def _heldout_error(self, x: Floats, t: Floats) -> float | None:
        """None when too few points would be left to fit."""
        order = np.argsort(x, kind="stable")
        out = order[1:-1][:: max(round(1 / self.holdout), 2)]
        rest = np.setdiff1d(order, out)
        if len(out) == 0 or len(rest) < 3 or np.ptp(x[rest]) == 0:
            return None
        alpha, beta, _, _ = self._solve(x[rest], t[rest])
        return float(np.median(np.abs(alpha * x[out] + beta - t[out]) / t[out]))

    def _require_fit(self) -> None:
        if not hasattr(self, "alpha_"):
            raise NotFitted("fit before predicting")


def _checked(sizes: Sequence[float] | Floats, times: Sequence[float] | Floats) -> tuple[Floats, Floats]:
    x, t = np.array(sizes, dtype=np.float64), np.array(times, dtype=np.float64)
    if x.ndim != 1 or x.shape != t.shape:
        raise CannotFit(f"expected as many sizes as times, got shapes {x.shape} and {t.shape}")
    if len(x) < 3:
        raise CannotFit(f"expected at least 3 points, got {len(x)}")
    if not (np.isfinite(x).all() and np.isfinite(t).all()):
        raise CannotFit("expected finite sizes and times")
    if (t <= 0).any():
        raise CannotFit(f"expected times above 0, got {float(t.min()):.6g}")
    if np.ptp(x) == 0:
        raise CannotFit(f"expected sizes that differ, all are {float(x[0]):.6g}")
    return x, t


def _student(confidence: float, degrees: int) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2)) if degrees > 0 else math.inf
