"""Confidence intervals for the mean of a correlated sequence: batch means, with a control variate if one is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half-width of its confidence interval; `plain` is the mean before the control was applied."""

    mean: float
    half_width: float
    plain: float


def student_quantile(confidence: float, degrees: int) -> float:
    """Two-sided quantile of Student's t, by its expansion about the normal (error below 1 % from 4 degrees on)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def controlled_mean(batches: Floats, control: Floats, control_mean: float, confidence: float = 0.95) -> Estimate:
    """Mean of batch means, (n,) with n ≥ 10, corrected by the deviation of a control with known mean in the batches.

    A least-squares line of `batches` on `control` is read off at `control_mean`. Sampling noise and the rest of a
    start-up transient, as far as the control explains them, drop out. Batches that are still correlated widen the
    interval (`_worth`).
    """
    count = len(batches)
    plain, centre = float(batches.mean()), float(control.mean())
    variation = float(((control - centre) ** 2).sum())
    negligible = 1e-18 * max(abs(centre), 1.0) ** 2 * count
    slope = float(((control - centre) * (batches - plain)).sum()) / variation if variation > negligible else 0.0
    residuals = batches - plain - slope * (control - centre)
    leverage = (centre - control_mean) ** 2 / variation if variation > negligible else 0.0
    inflation, degrees = _worth(residuals, fitted=2)
    variance = float((residuals**2).sum()) / (count - 2) * (1 / count + leverage) * inflation
    half_width = student_quantile(confidence, degrees) * math.sqrt(variance)
    return Estimate(plain - slope * (centre - control_mean), half_width, plain)


def ratio_of_means(numerator: Floats, denominator: Floats, confidence: float = 0.95) -> Estimate:
    """Σ numerator / Σ denominator over batches, with the interval of the delta method."""
    count = len(numerator)
    ratio = float(numerator.sum() / denominator.sum())
    residuals = (numerator - ratio * denominator) / float(denominator.mean())
    inflation, degrees = _worth(residuals, fitted=1)
    variance = float((residuals**2).sum()) / (count - 1) / count * inflation
    return Estimate(ratio, student_quantile(confidence, degrees) * math.sqrt(variance), ratio)


def _worth(residuals: Floats, fitted: int) -> tuple[float, int]:
    """The factor by which correlation inflates the variance of a mean, and the remaining degrees of freedom.

    Residuals are a first-order autoregression, whose ρ from few batches is low by about (1 + 3ρ)/n; n batches are then
    worth n (1 − ρ)/(1 + ρ) independent ones, less the `fitted` parameters.
    """
    count, power = len(residuals), float((residuals**2).sum())
    if power <= 0:
        return 1.0, count - fitted
    rho = max(float((residuals[1:] * residuals[:-1]).sum()) / power, 0.0)
    rho = min(rho + (1 + 3 * rho) / count, 0.9)
    inflation = (1 + rho) / (1 - rho)
    return inflation, max(int(count / inflation) - fitted, 4)
