"""Errors of predicted metrics and step times, repeat by repeat, and how often intervals contain them."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.fitting.estimator import CannotFit
from latency_models.sources.engine_regression import EngineRegression
from reports.fields import SHARES
from reports.metrics import spread, student_quantile
from scenarios.serving import ServingScenario
from schedulers.replica_set import ScalingLog
from schedulers.speculation import SpeculationStats
from twin.serving.engine.speculation import describe_speculation
from twin.serving.plan.plan import ServingPlan
from twin.serving.records.requests import Columns
from twin.serving.results.groups import MISSED
from twin.serving.results.report import curve
from twin.serving.results.summary import Run, summarise
from twin.serving.results.uncertainty import CONFIDENCE, combine, flatten
from twin.serving.run.simulation import Simulation
from twin.validation.backend import TimedBatch

Floats = NDArray[np.float64]


def fleet_summary(columns: Mapping[str, Floats], log: ScalingLog | None, scenario: ServingScenario) -> dict[str, Any]:
    """The section `fleet` of a run's summary; nothing without autoscaling.

    `goals_met`: share of the requests that meet all goals. `periods_met`: share of the times between two decisions in
    which at most 1 % of the requests that arrive miss one.
    """
    if log is None or scenario.system.autoscaling is None:
        return {}
    arrival, first, last = columns["arrival"], columns["first_token"], columns["last_token"]
    gaps = np.maximum(columns["output_tokens"] - 1, 1)
    values = {"ttft": first - arrival, "tpot": (last - first) / gaps, "e2e": last - arrival}
    good = np.all([values[name] <= limit for name, limit in scenario.measure.slo.items()], axis=0)
    periods = (arrival // scenario.system.autoscaling["engine"].sync_period).astype(np.int64)
    requests, wrong = np.bincount(periods), np.bincount(periods, ~good)
    return {
        "fleet": {
            "goals_met": float(good.mean()),
            "periods_met": float((wrong <= MISSED * requests)[requests > 0].mean()),
            "engine_seconds": sum(log.engine_seconds(float(last.max())).values()),
            "started": log.started,
        }
    }


def simulated_summary(plan: ServingPlan, run: Run) -> dict[str, Any]:
    """The summary of a simulated run, and of its fleet."""
    names = ("arrival", "first_token", "last_token", "output_tokens")
    columns = {name: np.asarray(getattr(run.columns, name), dtype=np.float64) for name in names}
    (log,) = run.scaling or (None,)
    return summarise(run, plan.scenario.measure) | fleet_summary(columns, log, plan.scenario)


GOALS = {
    "tpot.mean": 0.03,
    "e2e.mean": 0.03,
    "output_throughput": 0.03,
    "ttft.mean": 0.05,
    "ttft.p99": 0.10,
    "tpot.p99": 0.10,
    "fleet.goals_met": 0.02,
    "fleet.engine_seconds": 0.05,
}
"""Limits of |predicted / measured − 1| of the forecast, of `SHARES` |predicted − measured|, averaged over repeats;
`--tolerance` multiplies them."""

STEP_GOAL = 0.05
"""Limit of the median of |predicted / measured − 1| over all steps of the forecast."""

OPTIONAL = (
    *("sessions.time.mean", "sessions.time.p99", "sessions.waited.mean", "sessions.resent_cached"),
    *("speculation.acceptance_rate", "speculation.mean_acceptance_length", "speculation.tokens_per_decode"),
    *("fleet.goals_met", "fleet.periods_met", "fleet.engine_seconds"),
)
"""Metrics of sessions, speculative decoding and autoscaled fleets, compared where all runs have them."""

WORST = 10
TIMELINE_POINTS = 200


def metrics(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """TTFT, TPOT and E2E of each request, and all inter-token latencies, seconds, as `twin simulate` defines them."""
    first, last, tokens = columns["first_token"], columns["last_token"], columns["output_tokens"]
    several = tokens > 1
    return {
        "ttft": first - columns["arrival"],
        "tpot": (last - first)[several] / (tokens[several] - 1),
        "itl": columns["gaps"],
        "e2e": last - columns["arrival"],
    }


def summary(columns: Mapping[str, Floats], speculation: SpeculationStats | None = None) -> dict[str, Any]:
    """The summary of a live run, with the keys of `twin.simulation/1`. `speculation`: its counters of drafts."""
    seconds = float(columns["last_token"].max() - columns["arrival"].min())
    result: dict[str, Any] = {name: spread(values) for name, values in metrics(columns).items()}
    result["output_throughput"] = float(columns["output_tokens"].sum()) / seconds
    result["request_throughput"] = len(columns["arrival"]) / seconds
    if "session" in columns:
        result["sessions"] = session_summary(columns)
    if speculation is not None:
        result["speculation"] = describe_speculation([speculation])
    return result


def session_summary(columns: Mapping[str, Floats]) -> dict[str, Any]:
    """Metrics of the sessions of a live run, as in `twin.serving.results.summary`; times in seconds."""
    numbers = columns["session"].astype(np.int64)
    rounds = numbers * (1 + int(columns["turn"].max())) + columns["turn"].astype(np.int64)
    _, first = np.unique(rounds, return_index=True)
    spans = _latest(rounds, columns["last_token"]) - columns["arrival"][first]  # a round is sent at once
    ends = _latest(numbers, columns["last_token"])
    starts = -_latest(numbers, -columns["arrival"])
    waits: Floats = np.bincount(np.unique(numbers, return_inverse=True)[1][first], spans).astype(np.float64)
    resent = float(columns["resent_tokens"].sum())
    cached = float(np.minimum(columns["cached_tokens"], columns["resent_tokens"]).sum())
    return {
        "count": len(ends),
        "turns": len(first) / len(ends),
        "requests": len(numbers) / len(ends),
        "time": spread(ends - starts),
        "waited": spread(waits),
        "resent_share": resent / float(columns["prompt_tokens"].sum()),
        "resent_cached": cached / resent if resent else None,
    }


def _latest(groups: NDArray[np.int64], times: Floats) -> Floats:
    """The latest time of each group, in order of the groups' numbers."""
    _, places = np.unique(groups, return_inverse=True)
    latest = np.full(int(places.max()) + 1, -np.inf)
    np.maximum.at(latest, places, times)
    return latest


def error_entry(live: Floats, twin: Floats, errors: Floats, repeat_spread: float, goal: float | None) -> dict[str, Any]:
    """A metric's means, its mean error with a confidence interval, and its goal."""
    n, error = len(errors), float(errors.mean())
    half = student_quantile(CONFIDENCE, n - 1) * float(errors.std(ddof=1)) / math.sqrt(n)
    return {
        "measured": float(live.mean()),
        "predicted": float(twin.mean()),
        "error": error,
        "interval": [error - half, error + half],
        "repeat_spread": repeat_spread,
        "goal": goal,
    }


def compare_load(
    measured: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, Any]],
    alternatives: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Mean, error and goal of each metric over the repeats of a load; `alternatives`: further predictions.

    Both runs of a repeat have the same requests, so errors are taken repeat by repeat.
    """
    live_tables, twin_tables, *others = (
        [flatten(dict(run)) for run in runs] for runs in (measured, predicted, *alternatives.values())
    )
    metrics = {}
    for name in _names(measured[0], [*live_tables, *twin_tables]):
        live, twin, *more = (
            np.array([table[name] for table in tables], dtype=np.float64)
            for tables in (live_tables, twin_tables, *others)
        )
        spread_of_repeats = float(live.std(ddof=1) / live.mean())
        metrics[name] = error_entry(live, twin, _errors_of(name, twin, live), spread_of_repeats, GOALS.get(name)) | {
            key: float(_errors_of(name, values, live).mean()) for key, values in zip(alternatives, more, strict=True)
        }
    return metrics


def _errors_of(name: str, twin: Floats, live: Floats) -> Floats:
    """The error of each repeat: relative, of shares absolute."""
    return twin - live if name in SHARES else twin / live - 1


def compare_steps(repeats: Sequence[Sequence[TimedBatch]], models: Sequence[EngineRegression]) -> dict[str, Any]:
    """Step-time errors by kind of batch over all repeats, and the steps with the largest errors in seconds.

    `models`: of each repeat.
    """
    steps = [step for repeat in repeats for step in repeat]
    kinds, measured = np.array([row.kind for row in steps]), np.array([row.step.seconds for row in steps])
    predicted = np.concatenate(
        [model.predict([row.step for row in repeat]) for repeat, model in zip(repeats, models, strict=True)]
    )
    errors = predicted / measured - 1
    by_kind = {kind: _errors(errors[kinds == kind], measured[kinds == kind]) for kind in np.unique(kinds).tolist()}
    order = np.argsort(-np.abs(predicted - measured))[:WORST].tolist()
    return {
        "all": _errors(errors, measured),
        "by_kind": by_kind,
        "total_error": float(predicted.sum() / measured.sum() - 1),
        "worst": [
            {
                "kind": steps[i].kind, "batch": steps[i].batch,
                "measured": float(measured[i]), "predicted": float(predicted[i]),
            }
            for i in order
        ],
    }  # fmt: skip


def refit_error(repeats: Sequence[Sequence[TimedBatch]], block_size: int) -> float | None:
    """Median relative error of every second step, by a fit to the others; None for repeats too short for one."""
    errors: list[Floats] = []
    for repeat in repeats:
        steps = [row.step for row in repeat]
        with contextlib.suppress(CannotFit):
            errors.append(np.abs(EngineRegression(block_size).fit(steps[::2]).errors(steps[1::2])))
    return float(np.median(np.concatenate(errors))) if errors else None


def _errors(errors: Floats, measured: Floats) -> dict[str, Any]:
    size = np.abs(errors)
    return {
        "steps": len(errors),
        "seconds": float(measured.sum()),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.median(errors)),
    }


def curves(columns: Sequence[Mapping[str, Floats]]) -> dict[str, Any]:
    """Quantiles of every metric over all repeats, for plots of distributions."""
    repeats = [metrics(repeat) for repeat in columns]
    return {name: curve(np.concatenate([values[name] for values in repeats])) for name in repeats[0]}


def missed(loads: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """One line for each forecast error that exceeds its goal times `tolerance`."""
    lines = []
    for load in loads:
        for name, entry in load["metrics"].items():
            unit = "points" if name in SHARES else "%"
            if entry["goal"] is not None and abs(entry["error"]) > entry["goal"] * tolerance:
                lines.append(
                    f"load {load['load']:g}: the forecast of {name} is off by {100 * entry['error']:+.1f} {unit},"
                    f" goal {100 * entry['goal'] * tolerance:g} {unit}"
                )
        median = load["steps"]["all"]["median"]
        if median > STEP_GOAL * tolerance:
            lines.append(
                f"load {load['load']:g}: the forecast of steps is off by {100 * median:.1f} % in the median,"
                f" goal {100 * STEP_GOAL * tolerance:g} %{_of_refit(load['steps'].get('refit_median'))}"
            )
    return lines


def _of_refit(error: float | None) -> str:
    return "" if error is None else f"; a fit to every other of these very steps is off by {100 * error:.1f} %"


def _names(first: Mapping[str, Any], tables: Sequence[Mapping[str, float | None]]) -> list[str]:
    """Metrics of all summaries: those that every run has, and of `OPTIONAL` those that none lacks."""
    nested = [f"{key}.{inner}" for key in ("ttft", "tpot", "itl", "e2e") if first[key] for inner in first[key]]
    common = [name for name in OPTIONAL if all(table.get(name) for table in tables)]
    return [*nested, "output_throughput", "request_throughput", *common]


def timeline(live: Mapping[str, Floats], twin: Columns) -> dict[str, Any]:
    """Number of requests that have arrived and not finished, at each `time` in seconds."""
    arrivals, finished = np.array(twin.arrival), np.array(twin.last_token)
    end = float(max(live["last_token"].max(), finished.max()))
    times = np.linspace(0.0, end, TIMELINE_POINTS)
    return {
        "time": times.tolist(),
        "live": _in_system(live["arrival"], live["last_token"], times),
        "twin": _in_system(arrivals, finished, times),
    }


def _in_system(arrivals: Floats, finished: Floats, times: Floats) -> list[int]:
    arrived = np.searchsorted(np.sort(arrivals), times, side="right")
    departed = np.searchsorted(np.sort(finished), times, side="right")
    counts: list[int] = (arrived - departed).tolist()
    return counts


DRAWS = 10
"""Draws of the step-time model, in the first repeat's requests."""


def drawn_summaries(plan: ServingPlan) -> list[dict[str, Any]]:
    """Summaries of the first repeat with drawn step times; none if their error is unknown."""
    if not plan.can_draw:
        return []
    return [simulated_summary(plan, Simulation(plan, 0, draw).run()) for draw in range(DRAWS)]


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
