"""A window: one replication of a candidate, reduced to what a verdict needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread, weighted_spread
from scenarios.fields import Goal, MeasureSpec
from twin.planning.question import Document
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.results.run import Run
from twin.serving.results.summary import (
    RequestLatencies,
    in_measured_window,
    overload,
    pooled_gaps,
    request_latency,
    summarise,
)
from twin.serving.run.simulation import Simulation, realisation
from workloads.errors import BadInput

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """One run to make.

    Attributes:
        key: its name in a run folder. replication, draw: as in `Simulation`.
    """

    key: str
    plan: ServingPlan
    goals: tuple[Goal, ...]
    replication: int
    draw: Draw = None


def run_window(window: Window) -> Document:
    """Simulate a window.

    Returns:
        `summary` as of a simulation; `values`, the metric of each goal (None: no request counts); `excess` and
        `variance` of each goal (`confidence`); `overload`, as in a simulation; `requests`, simulated; `refused`, a
        reason why it cannot be simulated, beside nothing else.
    """
    try:
        run = Simulation(window.plan, window.replication, window.draw).run()
    except BadInput as error:
        return {"refused": str(error)}
    measure = window.plan.scenario.measure
    summary = summarise(run, measure)
    metrics = [_goal(goal, window, run, summary) for goal in window.goals]
    return {
        "summary": summary,
        "values": [value for value, _, _ in metrics],
        "excess": [excess for _, excess, _ in metrics],
        "variance": [variance for _, _, variance in metrics],
        "overload": overload(run, window.plan),
        "requests": window.plan.requests,
        "outside": run.outside,
    }


def _goal(goal: Goal, window: Window, run: Run, summary: Document) -> tuple[float | None, float, float]:
    """A goal's metric, its excess, and the variance of that for independent requests that just meet the goal."""
    measure = window.plan.scenario.measure
    if goal.metric == "itl":
        gaps, weights = pooled_gaps(run.logs, measure)
        return _latency(goal, gaps, weights)
    if goal.at_most:
        values = RequestLatencies(run.columns, measure).counted()[goal.metric]
        if goal.of is not None:
            values = _of_class(goal, window, run, measure)
        return _latency(goal, values, None)
    if goal.metric == "goodput":
        return _goodput(goal, summary)
    rate, seconds = summary[goal.metric], summary["duration"]
    if rate is None:
        return None, math.inf, 0.0
    per_request = summary["output_tokens"] / max(summary["requests"], 1) if goal.metric[0] == "o" else 1.0
    return rate, (goal.limit - rate) * seconds, goal.limit * seconds * per_request


def _latency(goal: Goal, values: Floats, weights: NDArray[np.int64] | None) -> tuple[float | None, float, float]:
    weights = np.ones(len(values), dtype=np.int64) if weights is None else weights
    count = int(weights.sum())
    if not count:
        return None, 0.0, 0.0
    if goal.quantile is None:
        mean = float((values * weights).sum()) / count
        variance = float(((values - mean) ** 2 * weights).sum())
        return mean, (mean - goal.limit) * count, variance
    q = 100 * goal.quantile
    quantiles = spread(values, (q,)) if weights.max() == 1 == weights.min() else weighted_spread(values, weights, (q,))
    assert quantiles is not None
    expected = (1 - goal.quantile) * count
    over = float(weights[values > goal.limit].sum())
    return quantiles[f"p{q:g}"], over - expected, expected * goal.quantile


def _goodput(goal: Goal, summary: Document) -> tuple[float | None, float, float]:
    """The share of the requests that count which meet all of `measure.slo`."""
    requests = summary["requests"]
    if not requests:
        return None, math.inf, 0.0
    good = round(summary["goodput"] * summary["duration"])
    return good / requests, goal.limit * requests - good, goal.limit * (1 - goal.limit) * requests


def _of_class(goal: Goal, window: Window, run: Run, measure: MeasureSpec) -> Floats:
    """Latencies of the requests of one task or model."""
    classes = {
        request.id: goal.of in (request.task, request.model)
        for request, _ in realisation(window.plan, window.replication)
    }
    ids = np.frombuffer(run.columns.id, dtype=np.int64)
    rows = np.array([classes[i] for i in ids.tolist()], dtype=bool) & in_measured_window(run.columns, measure)
    values = request_latency(goal.metric, run.columns, measure)[rows]
    return values[~np.isnan(values)]


def needs_detail(goals: list[Goal]) -> bool:
    """True if a run must keep the requests' ids, for goals of some of the requests."""
    return any(goal.of is not None for goal in goals)


def describe_overload(load: Document) -> str:
    """The reason why a candidate is saturated, in words."""
    arrive, start = load["arrival_rate"], load["service_rate"]
    engines: list[Any] = load["engines"]
    names = engines[0] if len(engines) == 1 else f"{engines[0]} … {engines[-1]}"
    return f"saturated: {arrive:.3g} requests/s arrive at {names} and {start:.3g} start; {load['waiting']} wait"
