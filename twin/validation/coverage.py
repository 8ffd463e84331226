"""Intervals of a forecast, and how often they contain what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from reports.statistics import student_quantile
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import summarise
from twin.serving.results.uncertainty import CONFIDENCE, combine, flatten
from twin.serving.run.simulation import Simulation

DRAWS = 10
"""Draws of the step-time model, in the first repeat's requests."""


def drawn_summaries(plan: ServingPlan) -> list[dict[str, Any]]:
    """Summaries of the first repeat with drawn step times; none if their error is unknown."""
    if not plan.can_draw:
        return []
    return [summarise(Simulation(plan, 0, draw).run(), plan.scenario.measure) for draw in range(DRAWS)]


def summaries_of_drafts(plan: ServingPlan) -> list[dict[str, Any]]:
    """Summaries of the first repeat with other luck of the drafts, which a forecast does not know; else none."""
    if plan.scheduler.speculation is None:
        return []
    return [summarise(Simulation(plan, 0, drafts=1 + i).run(), plan.scenario.measure) for i in range(DRAWS)]


def forecast_intervals(
    measured: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, Any]],
    draws: Sequence[Mapping[str, Any]],
    of_drafts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, dict[str, Any]]:
    """The interval of each metric, and the number of repeats whose measured value it contains.

    `forecast_interval` is of one more run with other requests, with its relative `parts` by sampling, model and drafts.
    `inside` counts by the interval of model and drafts alone around the forecast for a repeat's own requests.
    """
    _, intervals = combine([*map(dict, predicted)], [*map(dict, draws)])
    tables = [(flatten(dict(live)), flatten(dict(twin))) for live, twin in zip(measured, predicted, strict=True)]
    entries = {}
    for name, interval in intervals.items():
        model = interval["parts"]["model"]
        if of_drafts:
            interval["parts"]["drafts"] = luck = _deviation([flatten(dict(run)).get(name) for run in of_drafts])
            model = None if model is None or luck is None else math.hypot(model, luck)
        reach = None if model is None else model * student_quantile(CONFIDENCE, len(draws) - 1)
        values = [(live.get(name), twin.get(name)) for live, twin in tables]
        entries[name] = {
            "forecast_interval": interval["prediction"],
            "parts": interval["parts"],
            "inside": None if reach is None else sum(_within(live, twin, reach) for live, twin in values),
        }
    return entries


def coverage(loads: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, int] | None:
    """Measured values of these metrics, over loads and repeats, and how many lie in their intervals."""
    entries = [
        (load["metrics"][name]["inside"], len(load["measured"]))
        for load in loads
        for name in names
        if load["metrics"].get(name, {}).get("inside") is not None
    ]
    if not entries:
        return None
    return {"inside": sum(inside for inside, _ in entries), "values": sum(repeats for _, repeats in entries)}


def _deviation(values: Sequence[float | None]) -> float | None:
    """The relative deviation of values of one metric; None if one is missing, or all are 0."""
    numbers = [value for value in values if value is not None]
    mean = statistics.fmean(numbers) if numbers else 0.0
    return statistics.stdev(numbers) / mean if len(numbers) == len(values) and mean else None


def _within(live: float | None, twin: float | None, reach: float) -> bool:
    if not live or not twin:
        return live == twin
    return abs(math.log(live / twin)) <= reach
