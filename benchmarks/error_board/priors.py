"""Prior deviations of errors, by the density that they give rows whose configuration, model or system is left out.

They were chosen on 420 measurements of each kind, drawn at random from all, so these were in sight. No mean depends on
the scale of a prior, and intervals are scaled by the rows outside what is left out (`correction.half_intervals`).
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.error_board.correction import Deviations, Prior

_APART: dict[str, Prior] = {
    "tpot": Prior(
        {
            "all": Deviations(0.05, 0.08, 0.15),
            "engine": Deviations(0.05, 0.04, 0.15),
            "format": Deviations(0.06, 0.03, 0.2),
            "family": Deviations(0.08, 0.03, 0.2),
            "model": Deviations(0.1, 0.05, 0.15),
            "served": Deviations(0.1, 0.06, 0.2),
            "release": Deviations(0.2, 0.12, 0.3),
            "cell": Deviations(0.12, 0.03, 0.15),
            "configuration": Deviations(0.03, 0.01, 0.02),
        },
        scatter=0.05,
    ),
    "ttft": Prior(
        {
            "all": Deviations(0.095, 0.075, 0.098),
            "engine": Deviations(0.099, 0.071, 1.2),
            "format": Deviations(0.058, 0.057, 0.29),
            "family": Deviations(0.067, 0.445, 0.26),
            "model": Deviations(0.075, 0.076, 0.071),
            "served": Deviations(0.065, 0.318, 0.074),
            "release": Deviations(0.032, 0.055, 0.073),
            "cell": Deviations(0.091, 0.466, 0.218),
            "configuration": Deviations(0.043, 0.046, 0.058),
        },
        scatter=0.32,
    ),
}

_ALIKE = {"tpot": Deviations(0.2, 0.3, 0.1), "ttft": Deviations(0.3, 0.4, 0.1)}
"""What rows share whose workers are assumed alike."""

PRIORS: dict[tuple[str, str], Prior] = {
    ("aggregated", "tpot"): Prior(
        {
            "all": Deviations(0.015, 0.02, 0.03),
            "engine": Deviations(0.014, 0.023, 0.032),
            "format": Deviations(0.014, 0.011, 0.026),
            "family": Deviations(0.046, 0.03, 0.117),
            "model": Deviations(0.1, 0.05, 0.15),
            "served": Deviations(0.1, 0.05, 0.15),
            "release": Deviations(0.036, 0.027, 0.386),
            "cell": Deviations(0.1, 0.03, 0.2),
            "configuration": Deviations(0.006, 0.006, 0.01),
        },
        scatter=0.024,
    ),
    ("aggregated", "ttft"): Prior(
        {
            "all": Deviations(0.096, 0.07, 0.509),
            "engine": Deviations(0.099, 0.067, 0.597),
            "format": Deviations(0.032, 0.068, 0.052),
            "family": Deviations(0.107, 0.045, 0.054),
            "model": Deviations(0.099, 0.078, 0.172),
            "served": Deviations(0.054, 0.08, 0.064),
            "release": Deviations(0.063, 0.325, 0.353),
            "cell": Deviations(0.2, 0.2, 0.3),
            "configuration": Deviations(0.03, 0.038, 0.047),
        },
        scatter=0.04,
    ),
    **{("disaggregated", quantity): prior for quantity, prior in _APART.items()},
    **{("assumed", quantity): replace(prior, assumed=_ALIKE[quantity]) for quantity, prior in _APART.items()},
}
"""By kind of rows and quantity."""

UNFAMILIAR: dict[tuple[str, str], Prior] = {
    ("aggregated", "tpot"): Prior(
        {
            "all": Deviations(0.002, 0.002, 0.003),
            "engine": Deviations(0.001, 0.002, 0.003),
            "format": Deviations(0.001, 0.001, 0.003),
            "family": Deviations(0.005, 0.003, 0.012),
            "model": Deviations(0.01, 0.005, 0.015),
            "served": Deviations(0.01, 0.005, 0.015),
            "release": Deviations(0.004, 0.003, 0.039),
            "cell": Deviations(0.15, 0.045, 0.3),
            "configuration": Deviations(0.006, 0.006, 0.01),
        },
        scatter=0.024,
    ),
}
"""Of a model or GPU that is left out, where what others share says less of it than of their own further layouts."""
