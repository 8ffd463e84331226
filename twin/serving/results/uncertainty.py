"""Means and 95 % intervals of metrics over several runs of one scenario.

Two things are not known of a run. Another realisation of its workload comes out differently (sampling), and its step
times are predictions (model). Replications vary the first at the model's estimates, draws the second in one and the
same realisation, so that each part is seen alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.fitting.estimator import student_quantile

CONFIDENCE = 0.95

Summary = dict[str, Any]


def combine(runs: Sequence[Summary], draws: Sequence[Summary] = ()) -> tuple[Summary, dict[str, Any]]:
    """The mean of every metric over replications, and its intervals.

    `runs` are replications at the estimates of the step-time model; `draws` are drawn models, each in the realisation
    of the first run. A metric's `confidence` interval holds its expectation, and its `prediction` interval one more
    run, for example a measured one; both use Student's t. More runs narrow the share of sampling in the expectation,
    but no number of draws makes the model better. `parts` has the deviation of one run by `sampling` and by `model`,
    relative to the metric; null for a part that was not varied.

    With draws, intervals of metrics that are never 0 are of their logarithms, since errors of models are factors. A
    single run has no intervals, nor has a metric that is missing in a run: latencies, where no request counts. A metric
    that is equal in all runs has one without width (see `with_width`).
    """
    table, draw_table = [flatten(run) for run in runs], [flatten(run) for run in draws]
    mean: dict[str, float | None] = {}
    intervals: dict[str, Any] = {}
    for name in table[0]:
        values, draw_values = [row.get(name) for row in table], [row.get(name) for row in draw_table]
        if any(value is None for value in (*values, *draw_values)):
            mean[name] = None
            continue
        sample, model = np.array(values, dtype=np.float64), np.array(draw_values, dtype=np.float64)
        mean[name] = float(sample.mean())
        interval = _intervals(sample, model)
        if interval is not None:
            intervals[name] = interval
    return unflatten(mean, runs[0]), intervals


def with_width(intervals: dict[str, Any]) -> dict[str, Any]:
    """Intervals without those of no width: that runs agree to the last digit does not mean that a metric is certain."""
    return {
        name: interval for name, interval in intervals.items() if interval["prediction"][0] < interval["prediction"][1]
    }


def sensitivities(centre: Summary, varied: Mapping[str, tuple[Summary, Summary]]) -> dict[str, dict[str, float]]:
    """The relative deviation of every metric that each unknown causes alone, by group of unknowns and metric.

    Args:
        centre: a run at the estimates.
        varied: the same run with one unknown at a score of -1 and of +1, by its name. Unknowns of a group are
            independent, so their squares add up.
    """
    squares: dict[str, dict[str, float]] = {}
    estimates = flatten(centre)
    for name, ends in varied.items():
        low, high = map(flatten, ends)
        group = squares.setdefault(name.partition(".")[0], {})
        for metric, value in estimates.items():
            below, above = low.get(metric), high.get(metric)
            if value and below is not None and above is not None:
                effect = (above - below) / 2 / value
                group[metric] = group.get(metric, 0.0) + effect**2
    return {name: {metric: math.sqrt(value) for metric, value in group.items()} for name, group in squares.items()}


def flatten(summary: Summary, prefix: str = "") -> dict[str, float | None]:
    """Nested metrics under dotted names, in one dictionary; those in a list by their places, from 0."""
    flat: dict[str, float | None] = {}
    for key, value in summary.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, list):
            flat |= {f"{name}.{i}": item for i, item in enumerate(value)}
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
        elif isinstance(old, list):
            result[key] = [values[f"{name}.{i}"] for i in range(len(old))]
        else:
            value = values[name]
            result[key] = int(value) if isinstance(old, int) and value is not None and value == int(value) else value
    return result


@dataclass(frozen=True, slots=True)
class _Part:
    """A variance and its degrees of freedom."""

    variance: float
    degrees: int


def _intervals(sample: NDArray[np.float64], model: NDArray[np.float64]) -> dict[str, Any] | None:
    """Both intervals of one metric, and its parts; None for a single run."""
    relative = len(model) > 0 and sample.min() > 0 and model.min() > 0
    if relative:
        sample, model = np.log(sample), np.log(model)
    centre = float(sample.mean()) + (float(model.mean() - sample[0]) if len(model) else 0.0)
    of_runs = _Part(float(sample.var(ddof=1)), len(sample) - 1) if len(sample) > 1 else None
    of_model = _Part(float(model.var(ddof=1)) * (1 + 1 / len(model)), len(model) - 1) if len(model) > 1 else None
    if of_runs is None and of_model is None:
        return None
    ends: dict[str, Any] = {}
    for kind, share in (("confidence", 1 / len(sample)), ("prediction", 1 + 1 / len(sample))):
        parts = [_Part(share * of_runs.variance, of_runs.degrees)] if of_runs else []
        reach = _reach([*parts, of_model] if of_model else parts)
        low, high = centre - reach, centre + reach
        ends[kind] = [math.exp(low), math.exp(high)] if relative else [low, high]
    scale = 1.0 if relative else abs(centre)
    parts_of_run = {"sampling": of_runs, "model": of_model}
    ends["parts"] = {
        name: None if part is None or not scale else math.sqrt(part.variance) / scale
        for name, part in parts_of_run.items()
    }
    return ends


def _reach(parts: Sequence[_Part]) -> float:
    """Half an interval for the sum of independent parts, with Satterthwaite's degrees of freedom."""
    total = sum(part.variance for part in parts)
    if not total:
        return 0.0
    degrees = total**2 / sum(part.variance**2 / part.degrees for part in parts)
    return student_quantile(CONFIDENCE, degrees) * math.sqrt(total)
