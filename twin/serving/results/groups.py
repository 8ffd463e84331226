"""Summaries of parts of a run: service classes, tenants and how fair it was to them, pools, minutes, and outages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.metrics import PERCENTILES, jain_index, quantiles
from scenarios.engine import EngineSpec, SchedulingSpec
from scenarios.fields import MeasureSpec
from twin.serving.plan.plan import ServingPlan
from twin.serving.plan.pools import PlannedPool, cost_per_million_tokens, describe_devices, devices_of
from twin.serving.records.requests import Columns, ShedLog
from twin.serving.results.summary import Floats, Mask, RequestLatencies, Run, shed_in_window

if TYPE_CHECKING:
    from schedulers.replica_set import ScalingLog

WINDOWS = 1000
"""Equal windows of a run in which service is compared."""

NONE = "(none)"
"""The name of requests without a class or tenant, where others have one."""

NO_SPREAD = dict.fromkeys(("mean", *(f"p{point}" for point in PERCENTILES)))
"""The spread of a latency that no request of a group has."""

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service of a token, where no policy says another."""


def summarise_clients(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """Latencies, counts and goals met of each service class and tenant; empty for a workload without them.

    None that was shed met all goals.
    """
    columns = run.columns
    if not columns.clients:
        return {}
    latencies = RequestLatencies(columns, plan.scenario.measure)

    def group(part: int, name: str, goals: Mapping[str, float] = {}) -> dict[str, Any]:
        """The requests of a class (part 0) or a tenant (part 1)."""
        mask = latencies.in_window & _are(columns, part, name)
        finished, shed = int(mask.sum()), 0
        more = {}
        if run.shed is not None:
            shed = int((shed_in_window(run.shed, plan.scenario.measure) & _are(run.shed, part, name)).sum())
            more = {"shed": shed, "shed_share": shed / (shed + finished) if shed + finished else 0.0}
        summary = latencies.group(mask, NO_SPREAD, **more)
        if goals:
            good = float((latencies.meet(goals) & mask).sum())
            summary["goals_met"] = good / (finished + shed) if finished + shed else None
        return summary

    summary: dict[str, Any] = {}
    classes, tenants = (list(dict.fromkeys(names)) for names in zip(*columns.clients, strict=True))
    if any(classes):
        specs = plan.scenario.workload.service_classes
        summary["service_classes"] = {
            name or NONE: group(0, name, specs[name].goals if name else {}) for name in classes
        }
    if any(tenants):
        weights = _weights(plan.pools[0].spec.engine)
        service = np.array([weights[0], weights[1]]) @ _tokens(columns)
        summary["tenants"] = {
            name or NONE: group(1, name)
            | {"service": float(service[latencies.in_window & _are(columns, 1, name)].sum())}
            for name in tenants
        }
        if len(tenants) > 1:
            summary["fairness"] = _fairness(columns, tenants, *weights)
    return summary


def _are(log: Columns | ShedLog, part: int, name: str) -> Mask:
    """A mask of the requests of a class (part 0) or a tenant (part 1)."""
    of = np.array([client[part] == name for client in log.clients])
    mask: Mask = of[np.asarray(log.client)]
    return mask


def _weights(engine: EngineSpec) -> tuple[float, float, dict[str, float]]:
    """Service of a prompt token and of an output token, and the weights of tenants, as in the order of waiting."""
    scheduling = engine.scheduling_policy
    parameters = scheduling.parameters if isinstance(scheduling, SchedulingSpec) else {}
    return (
        parameters.get("prompt_weight", PROMPT_WEIGHT),
        parameters.get("output_weight", OUTPUT_WEIGHT),
        parameters.get("weights", {}),
    )


def _tokens(columns: Columns) -> Floats:
    """Prompt and output tokens of each request, shape (2, n)."""
    return np.array([columns.tokens, columns.output_tokens], dtype=np.float64)


def _fairness(
    columns: Columns, tenants: list[str], prompt_weight: float, output_weight: float, weights: dict[str, float]
) -> dict[str, Any]:
    """Jain's index of the service of tenants, relative to what they were entitled to while they competed.

    The run is divided into windows. In each, tenants compete that have requests waiting for their first step all
    through it. Where two or more do, the service that they get together is what they are to share by their weights. A
    tenant's ratio is its service in these windows over its share of it. A prompt is served from its first step to the
    first token, an answer from there to its last token, both evenly.
    """
    arrivals, ends = np.frombuffer(columns.arrival), np.frombuffer(columns.last_token)
    edges = np.linspace(arrivals.min(), ends.max(), WINDOWS + 1)
    served, waits = np.empty((len(tenants), WINDOWS)), np.empty((len(tenants), WINDOWS), dtype=np.bool_)
    for row, name in enumerate(tenants):
        mask = _are(columns, 1, name)
        served[row] = np.diff(sum(_service(columns, mask, edges, prompt_weight, output_weight)))
        waits[row] = _backlogged(np.frombuffer(columns.queued)[mask], np.frombuffer(columns.started)[mask], edges)
    contested = waits.sum(axis=0) > 1
    shares = waits * np.array([[weights.get(name, 1.0)] for name in tenants])
    together = (served * waits).sum(axis=0) / np.maximum(shares.sum(axis=0), 1e-300)
    entitled = (shares * together)[:, contested].sum(axis=1)
    received = (served * waits)[:, contested].sum(axis=1)
    ratios = received[entitled > 0] / entitled[entitled > 0]
    return {"jain_index": jain_index(ratios) if len(ratios) > 1 else None, "contested": float(contested.mean())}


def _service(
    columns: Columns, mask: Mask, edges: Floats, prompt_weight: float, output_weight: float
) -> Iterator[Floats]:
    """Service of prompts and of answers until each edge."""
    started, first = np.frombuffer(columns.started)[mask], np.frombuffer(columns.first_token)[mask]
    tokens = _tokens(columns)[:, mask]
    yield _evenly(started, first, prompt_weight * tokens[0], edges)
    yield _evenly(first, np.frombuffer(columns.last_token)[mask], output_weight * tokens[1], edges)


def _evenly(begin: Floats, end: Floats, amounts: Floats, edges: Floats) -> Floats:
    """The sum until each edge of amounts that come evenly between begin and end, at once where these are equal."""
    at_once = end <= begin
    slopes = np.where(at_once, 0.0, amounts / np.where(at_once, 1.0, end - begin))
    return _steps(end[at_once], amounts[at_once], edges) + _ramps(begin, slopes, edges) - _ramps(end, slopes, edges)


def _steps(times: Floats, amounts: Floats, edges: Floats) -> Floats:
    order = np.argsort(times)
    sums = np.concatenate(([0.0], np.cumsum(amounts[order])))
    integral: Floats = sums[np.searchsorted(times[order], edges, side="right")]
    return integral


def _ramps(times: Floats, slopes: Floats, edges: Floats) -> Floats:
    """Σ slope · max(edge - time, 0)."""
    origin = edges[0]  # near the times, so that little is lost in the difference
    integral: Floats = (edges - origin) * _steps(times, slopes, edges) - _steps(times, slopes * (times - origin), edges)
    return integral


def _backlogged(queued: Floats, started: Floats, edges: Floats) -> Mask:
    """The windows all through which a request of these waits for its first step."""
    waits = np.zeros(len(edges) - 1, dtype=np.bool_)
    order = np.argsort(queued)
    if not len(order):
        return waits
    begins, until = queued[order], np.maximum.accumulate(started[order])
    fresh = np.concatenate(([True], begins[1:] > until[:-1]))  # a backlog begins
    last = np.concatenate((np.flatnonzero(fresh)[1:] - 1, [len(order) - 1]))
    for begin, end in zip(
        np.searchsorted(edges, begins[fresh]), np.searchsorted(edges, until[last], side="right"), strict=True
    ):
        waits[begin : max(end - 1, begin)] = True
    return waits


def summarise_pools(run: Run, plan: ServingPlan, seconds: float) -> dict[str, Any]:
    """Requests, latencies, throughput over `seconds`, work and cost of each pool whose engines finish requests.

    Empty with one such pool, and without detail, where records do not say which engine finished a request.
    """
    pools = [pool for pool in plan.pools if pool.spec.role != "prefill"]
    columns = run.columns
    if len(pools) < 2 or not columns.detail:
        return {}
    latencies = RequestLatencies(columns, plan.scenario.measure)
    in_window = latencies.in_window
    replica = np.array(columns.replica, dtype=np.int64)
    output = np.array(columns.output_tokens, dtype=np.int64)
    busy = {log.name: log.busy / run.end if run.end else 0.0 for log in run.logs}
    summaries: dict[str, Any] = {}
    for pool in pools:
        names = pool.names
        mask = in_window & np.isin(replica, [columns.replicas[name] for name in names if name in columns.replicas])
        throughput = float(output[mask].sum()) / seconds if seconds else None
        devices = describe_devices([pool]) if run.scaling is None else None
        share = float(mask.sum() / in_window.sum()) if in_window.any() else None
        summaries[pool.spec.name] = {
            "engines": len(names),
            **latencies.group(mask, NO_SPREAD, share=share),
            "output_throughput": throughput,
            "busy": sum(busy.get(name, 0.0) for name in names) / len(names),
            "cost_per_hour": devices and devices["cost_per_hour"],
            "cost_per_million_output_tokens": cost_per_million_tokens(devices, throughput),
        }
    return {"pools": summaries}


MINUTE = 60.0

MISSED = 0.01
"""A minute counts as missed if more than this share of its requests miss a goal."""


def engine_seconds(run: Run, pool: PlannedPool) -> float:
    """The time for which the engines of a pool are paid, summed over engines; without autoscaling, the whole run."""
    logs = [log for log in run.scaling or () if log.pool == pool.spec.name]
    if not logs:
        return len(pool.names) * run.end
    return sum(sum(log.engine_seconds(run.end).values()) for log in logs)


def mean_devices(run: Run, pools: Sequence[PlannedPool]) -> dict[str, Any] | None:
    """The fields of `describe_devices` with the means over the run; None if the devices of a pool are not known."""
    total, cost = 0.0, 0.0
    priced = True
    for pool in pools:
        device = devices_of(pool)
        if device is None:
            return None
        count = engine_seconds(run, pool) / run.end * device.count if run.end else 0.0
        total += count
        priced = priced and device.price_per_hour is not None
        cost += count * (device.price_per_hour or 0.0)
    return {"total": total, "cost_per_hour": cost if priced else None}


def scaling_summary(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """The numbers of an autoscaled run: see docs/reference/simulation-document.md."""
    hours, logs = run.end / 3600, run.scaling or []
    devices = mean_devices(run, plan.pools)
    cost = None if devices is None else devices["cost_per_hour"]
    minutes = goals_by_minute(run.columns, plan.scenario.measure)
    missed = None
    if minutes["missed"] is not None:
        came, wrong = np.array(minutes["requests"]), np.array(minutes["missed"])
        missed = float((wrong > MISSED * came)[came > 0].mean()) if came.any() else None
    return {
        "engine_hours": sum(engine_seconds(run, pool) for pool in plan.pools) / 3600,
        "gpu_hours": None if devices is None else devices["total"] * hours,
        "cost": None if cost is None else cost * hours,
        "started": sum(log.started for log in logs),
        "stopped": sum(log.stopped for log in logs),
        "pools": {
            pool.spec.name: {
                "engine_hours": engine_seconds(run, pool) / 3600,
                "mean_engines": engine_seconds(run, pool) / run.end if run.end else 0.0,
                "most_engines": int(_engines(run, pool.spec.name)[:, 1:].sum(axis=1).max()),
            }
            for pool in plan.pools
            if any(log.pool == pool.spec.name for log in logs)
        },
        "missed_minutes": missed,
    }


def scaling_document(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """The engines of each pool over time, and the requests of each minute."""
    names = dict.fromkeys(log.pool for log in run.scaling or ())
    return {
        "pools": {name: dict(zip(STATES, _engines(run, name).T.tolist(), strict=True)) for name in names},
        "minutes": goals_by_minute(run.columns, plan.scenario.measure),
    }


STATES = ("time", "up", "starting", "draining", "failed")
"""Columns of `ScalingLog.changes`."""


def _engines(run: Run, pool: str) -> Floats:
    """Rows of `STATES` of all engines of a pool, whatever their models, up to the end of the run."""
    logs = [log for log in run.scaling or () if log.pool == pool]
    times = np.unique([row[0] for log in logs for row in log.changes if row[0] <= run.end])
    counts = np.zeros((len(times), len(STATES)))
    counts[:, 0] = times
    for log in logs:
        counts[:, 1:] += states_at(log, times)
    return counts


def states_at(log: ScalingLog, times: Floats) -> Floats:
    """Engines up, starting, draining and failed at some times, shape (times, 4)."""
    rows = np.array(log.changes, dtype=np.float64)
    at: Floats = rows[np.searchsorted(rows[:, 0], times, side="right") - 1, 1:]
    return at


def goals_by_minute(columns: Columns, measure: MeasureSpec) -> dict[str, Any]:
    """The `requests` of each minute from 0 on, by arrival, how many of them `missed` a goal, and P99 latencies.

    `missed` is None without goals in `measure.slo`; a latency is None in a minute that has none.
    """
    minute = (np.asarray(columns.arrival) // MINUTE).astype(np.int64)
    count = int(minute.max()) + 1 if len(minute) else 0
    summary: dict[str, Any] = {
        "start": (MINUTE * np.arange(count)).tolist(),
        "requests": np.bincount(minute, minlength=count).tolist(),
        "missed": None,
    }
    latencies = RequestLatencies(columns, measure)
    if measure.slo:
        summary["missed"] = np.bincount(minute[~latencies.meet(measure.slo)], minlength=count).tolist()
    order = np.argsort(minute, kind="stable")
    edges = np.searchsorted(minute[order], np.arange(count + 1))
    for name, values in latencies.values.items():
        by_minute = [values[order[first:last]] for first, last in itertools.pairwise(edges)]
        summary[f"{name}_p99"] = [_p99(part[~np.isnan(part)]) for part in by_minute]
    return summary


def _p99(values: Floats) -> float | None:
    return float(quantiles(values, np.array([0.99]))[0]) if len(values) else None


def around_outages(run: Run, measure: MeasureSpec) -> dict[str, Any] | None:
    """Latencies of requests that came `during` an outage of any engine, `after` one, and `otherwise`.

    After an outage is as long as it lasted. None in a run without outages.
    """
    spans = sorted(span for log in run.logs for span in log.outages)
    if not spans:
        return None
    arrival, latencies = np.asarray(run.columns.arrival), RequestLatencies(run.columns, measure)
    during = _within(arrival, spans)
    after = _within(arrival, [(end, 2 * end - start) for start, end in spans]) & ~during
    good = latencies.meet(measure.slo)
    summaries: dict[str, Any] = {}
    for name, mask in {"during": during, "after": after, "otherwise": ~during & ~after}.items():
        mask &= latencies.in_window
        summaries[name] = latencies.group(mask)
        if measure.slo:
            summaries[name]["goodput_share"] = float(good[mask].mean()) if mask.any() else None
    return summaries


def _within(times: Floats, spans: Sequence[tuple[float, float]]) -> Mask:
    covered = np.zeros(len(times), dtype=np.bool_)
    for start, end in spans:
        covered |= (times >= start) & (times < end)
    return covered
