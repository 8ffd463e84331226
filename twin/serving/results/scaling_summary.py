"""Reports of autoscaled runs: engines and what they cost, goals missed by minute, and latencies around outages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.metrics import quantiles
from scenarios.fields import MeasureSpec
from twin.serving.plan.plan import ServingPlan
from twin.serving.plan.pools import PlannedPool, devices_of
from twin.serving.records.requests import Columns
from twin.serving.results.summary import Floats, Mask, RequestLatencies

if TYPE_CHECKING:
    from schedulers.replica_set import ScalingLog
    from twin.serving.results.run import Run

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
        summaries[name] = {"requests": int(mask.sum()), **latencies.spreads(mask)}
        if measure.slo:
            summaries[name]["goodput_share"] = float(good[mask].mean()) if mask.any() else None
    return summaries


def _within(times: Floats, spans: Sequence[tuple[float, float]]) -> Mask:
    covered = np.zeros(len(times), dtype=np.bool_)
    for start, end in spans:
        covered |= (times >= start) & (times < end)
    return covered
