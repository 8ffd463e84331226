"""The four fitted numbers of a bundle, by least squares with a weak prior.

Errors are relative, and weighed by the scatter of the measurements (one run a point, whose neighbours differ by about
1 %); a point far off counts linearly (soft L1). The prior matters where few points are fitted: a curve at one prompt
length does not tell time for each row from time for each tray, since both grow with r. Parameters are fitted as
logarithms, and so are positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from papers.fastafd.measurements import StepMeasurement
from papers.fastafd.stages import BundleParameters, LayerStages, predict_step

Floats = NDArray[np.float64]

SCATTER = 0.012
"""Relative standard deviation of one measured step."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A parameter as expected before any step is seen: a median, and the standard deviation of its logarithm."""

    median: float
    spread: float
    reason: str


def priors(stages: LayerStages) -> dict[str, Prior]:
    return {
        "sequence_seconds": Prior(1e-6, 1.0, "the order of a kernel's fixed part; hardly known"),
        "row_efficiency": Prior(stages.hardware.efficiency.compute, 0.3, "the hardware file's share of peak FLOP/s"),
        "tray_seconds": Prior(2e-6, 0.5, "half a microsecond for each GPU of a tray"),
        "exchange_seconds": Prior(39e-6, 1.5, "reported dispatch and combine calls, 17 and 22 µs; hidden in part"),
    }


def fit_bundle(stages: LayerStages, measured: Sequence[StepMeasurement]) -> BundleParameters:
    """Fit the parameters to measured steps; without any, they are the medians of the prior."""
    from scipy.optimize import least_squares

    expected = priors(stages)
    medians = np.log([expected[field.name].median for field in fields(BundleParameters)])
    spreads = np.array([expected[field.name].spread for field in fields(BundleParameters)])

    def residuals(logarithms: Floats) -> Floats:
        parameters = BundleParameters(*np.exp(logarithms).tolist())
        errors = np.array([relative_error(stages, parameters, row) for row in measured])
        return np.concatenate([_soften(errors / SCATTER), (logarithms - medians) / spreads])

    # The period is a maximum, so the loss has kinks: the best of several starts.
    starts = [medians + shift * np.array([1, 0, 0, 0]) + last * np.array([0, 0, 0, 1]) for shift, last in STARTS]
    solutions = [least_squares(residuals, start) for start in starts]
    best = min(solutions, key=lambda solution: float(solution.cost))
    return BundleParameters(*np.exp(best.x).tolist())


STARTS = [(shift, last) for shift in (-0.5, 0.5) for last in (-0.5, 0.5)]
"""Starting points of a fit: shifts of the logarithms of the first and the last parameter from their medians."""


def relative_error(stages: LayerStages, parameters: BundleParameters, row: StepMeasurement) -> float:
    return predict_step(stages, parameters, row.prompt_tokens, row.batch_size, row.ratio).tpot / row.tpot - 1


def _soften(residuals: Floats) -> Floats:
    """Residuals whose squares are the soft-L1 loss 2 (√(1 + z²) − 1)."""
    softened: Floats = np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + residuals**2) - 1))
    return softened
