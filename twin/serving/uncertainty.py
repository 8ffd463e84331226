"""Means and 95 % intervals of metrics over several runs of one scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95

Summary = dict[str, Any]


def combine(runs: Sequence[Sequence[Summary]]) -> tuple[Summary, dict[str, Any]]:
    """The mean of every metric over runs, and its intervals.

    `runs[d][r]` is the summary of replication r under draw d of the step-time model. A metric's `confidence` interval
    holds its expectation, and its `prediction` interval one more run, for example a measured one; both use Student's
    t. A draw stands for what is unknown of the hardware, which all its replications share, so with several draws the
    degrees of freedom count draws. A single run has no intervals, nor has a metric that is missing in a run.
    """
    table = [[flatten(summary) for summary in draw] for draw in runs]
    names = list(table[0][0])
    mean: dict[str, float | None] = {}
    intervals: dict[str, Any] = {}
    for name in names:
        values = [[row[name] for row in draw] for draw in table]
        if any(value is None for draw in values for value in draw):
            mean[name] = None
            continue
        array = np.array(values, dtype=np.float64)
        mean[name] = float(array.mean())
        if array.size > 1:
            intervals[name] = _intervals(array)
    return unflatten(mean, runs[0][0]), intervals


def flatten(summary: Summary, prefix: str = "") -> dict[str, float | None]:
    """Nested metrics under dotted names, in one dictionary."""
    flat: dict[str, float | None] = {}
    for key, value in summary.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def unflatten(values: dict[str, float | None], like: Summary, prefix: str = "") -> Summary:
    """The reverse of `flatten`, in the shape of `like`. Counts stay integers where all runs agree."""
    result: Summary = {}
    for key, old in like.items():
        name = f"{prefix}{key}"
        if isinstance(old, dict):
            result[key] = unflatten(values, old, f"{name}.")
        else:
            value = values[name]
            result[key] = int(value) if isinstance(old, int) and value is not None and value == int(value) else value
    return result


def _intervals(values: NDArray[np.float64]) -> dict[str, list[float]]:
    """Both intervals of one metric's values, shape (draws, replications)."""
    draws, replications = values.shape
    centre = float(values.mean())
    if draws > 1:
        groups = values.mean(axis=1)
        of_mean = float(groups.var(ddof=1)) / draws
        within = float(values.var(axis=1, ddof=1).mean()) if replications > 1 else 0.0
        of_run = float(groups.var(ddof=1)) + within * (1 - 1 / replications)
        degrees = draws - 1
    else:
        of_run = float(values.var(ddof=1))
        of_mean = of_run / replications
        degrees = replications - 1
    reach = _student(degrees)
    confidence, prediction = reach * math.sqrt(of_mean), reach * math.sqrt(of_run + of_mean)
    return {
        "confidence": [centre - confidence, centre + confidence],
        "prediction": [centre - prediction, centre + prediction],
    }


def _student(degrees: int) -> float:
    from scipy.special import stdtrit  # slow to import, and only several runs need it

    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))
