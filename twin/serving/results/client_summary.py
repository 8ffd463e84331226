"""The summary of a run by service class and by tenant, and how fair it was to tenants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from reports.metrics import PERCENTILES, jain_index
from scenarios.engine import EngineSpec, SchedulingSpec
from twin.serving.plan.plan import ServingPlan
from twin.serving.plan.pools import cost_per_million_tokens, describe_devices
from twin.serving.records.requests import Columns
from twin.serving.results.run import Run
from twin.serving.results.summary import Floats, Mask, RequestLatencies, shed_in_window

WINDOWS = 1000
"""Equal windows of a run in which service is compared."""

NONE = "(none)"
"""The name of requests without a class or tenant, where others have one."""

NO_SPREAD = dict.fromkeys(("mean", *(f"p{point}" for point in PERCENTILES)))
"""The spread of a latency that no request of a group has."""

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service of a token, where no policy says another."""


def summarise_clients(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """Latencies, counts and goals met of each service class and tenant; empty for a workload without them."""
    columns = run.columns
    if not columns.clients:
        return {}
    summary: dict[str, Any] = {}
    classes, tenants = (list(dict.fromkeys(names)) for names in zip(*columns.clients, strict=True))
    specs = plan.scenario.workload.service_classes
    latencies = RequestLatencies(columns, plan.scenario.measure)
    in_window = latencies.in_window
    if any(classes):
        summary["service_classes"] = {
            name or NONE: _of(
                latencies,
                in_window & _are(columns, 0, name),
                specs[name].goals if name else {},
                _num_shed(run, plan, 0, name),
            )
            for name in classes
        }
    if any(tenants):
        weights = _weights(plan.pools[0].spec.engine)
        service = np.array([weights[0], weights[1]]) @ _tokens(columns)
        summary["tenants"] = {
            name or NONE: _of(
                latencies, (mask := in_window & _are(columns, 1, name)), {}, _num_shed(run, plan, 1, name)
            )
            | {"service": float(service[mask].sum())}
            for name in tenants
        }
        if len(tenants) > 1:
            summary["fairness"] = _fairness(columns, tenants, *weights)
    return summary


def _are(columns: Columns, part: int, name: str) -> Mask:
    """A mask of the requests of a class (part 0) or a tenant (part 1)."""
    of = np.array([client[part] == name for client in columns.clients])
    mask: Mask = of[np.asarray(columns.client)]
    return mask


def _num_shed(run: Run, plan: ServingPlan, part: int, name: str) -> int | None:
    """Requests of a class (part 0) or a tenant (part 1) that were shed; None without admission control."""
    if run.shed is None:
        return None
    of = np.array([client[part] == name for client in run.shed.clients])
    in_window = shed_in_window(run.shed, plan.scenario.measure)
    return int((in_window & of[np.array(run.shed.client, dtype=np.int64)]).sum())


def _of(latencies: RequestLatencies, mask: Mask, goals: dict[str, float], shed: int | None) -> dict[str, Any]:
    """The count and the latencies of some requests, and the share that met all goals; none that was shed did."""
    finished = int(mask.sum())
    summary: dict[str, Any] = {"requests": finished}
    if shed is not None:
        summary |= {"shed": shed, "shed_share": shed / (shed + finished) if shed + finished else 0.0}
    summary |= latencies.spreads(mask, NO_SPREAD)
    if goals:
        offered = finished + (shed or 0)
        summary["goals_met"] = float((latencies.meet(goals) & mask).sum()) / offered if offered else None
    return summary


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
        summaries[pool.spec.name] = {
            "engines": len(names),
            "requests": int(mask.sum()),
            "share": float(mask.sum() / in_window.sum()) if in_window.any() else None,
            **latencies.spreads(mask, NO_SPREAD),
            "output_throughput": throughput,
            "busy": sum(busy.get(name, 0.0) for name in names) / len(names),
            "cost_per_hour": devices and devices["cost_per_hour"],
            "cost_per_million_output_tokens": cost_per_million_tokens(devices, throughput),
        }
    return {"pools": summaries}
