"""The report of a run with its energy, overload and curves, and the document `twin.simulation/1` of a plan run once.

Energy follows from the power limits of the devices and the tokens that a step computes: in a step a device draws a
share of its limit that grows with each doubling of the step's tokens. Its two points are an H100 SXM of 700 W that
decodes: 300 W with one sequence and 600 W with 128 (ML.ENERGY Benchmark v3.0), and what it draws with more. Between
steps it draws its idle power. `python -m benchmarks.power` compares it with measured engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import quantiles, spread
from reports.run_directory import fingerprint
from scenarios.fields import MeasureSpec
from scenarios.reading import Settings, plugin_digest
from scenarios.serving import ClosedLoopSpec
from twin.serving.plan.plan import ServingPlan, describe
from twin.serving.plan.pools import cost_per_million_tokens, describe_devices, devices_of
from twin.serving.records.engine_log import Backlog
from twin.serving.records.requests import Columns
from twin.serving.results.groups import (
    STATES,
    around_outages,
    mean_devices,
    scaling_document,
    scaling_summary,
    states_at,
    summarise_clients,
    summarise_pools,
)  # fmt: skip
from twin.serving.results.summary import (
    RequestLatencies,
    Run,
    engine_summaries,
    link_summaries,
    outages,
    pooled_gaps,
    summarise,
)
from twin.serving.results.uncertainty import flatten
from workloads.errors import BadInput, readable
from workloads.json_files import number_lines

ONE_TOKEN = 300 / 700
MANY_TOKENS, MANY = 600 / 700, 128

IDLE = 0.15
"""Share of the limit that a device with loaded weights draws between steps, where its own is not stated."""

ERROR = 0.12
"""Median relative error of the power of 565 measured engines on H100 and B200 (docs/accuracy.md)."""


def step_share(tokens: float) -> float:
    """The share of its power limit that a device draws in steps of so many tokens."""
    return ONE_TOKEN + (MANY_TOKENS - ONE_TOKEN) * log2(min(max(tokens, 1.0), MANY)) / log2(MANY)


def energy_summary(run: Run, plan: ServingPlan) -> dict[str, Any] | None:
    """The energy of all devices while they are paid for; None where a pool's devices have no power limit."""
    joules = 0.0
    engines = {engine.name: (engine, log) for engine, log in zip(run.engines, run.logs, strict=True)}
    for pool in plan.pools:
        device = devices_of(pool)
        if device is None or device.power_limit is None:
            return None
        for name in pool.names:
            engine, log = engines[name]
            decoded = sum(int(decodes @ repeats) for _, decodes, repeats in log.step_parts(1 << 20))
            tokens = engine.counters.prefill_tokens + decoded
            watts = device.power_limit * step_share(tokens / log.num_steps) if log.num_steps else 0.0
            idle = max(run.engine_seconds(name) - log.busy, 0.0)
            idle_watts = IDLE * device.power_limit if device.idle_power is None else device.idle_power
            joules += device.count / pool.spec.engines_per_device * (log.busy * watts + idle * idle_watts)
    output_tokens = sum(run.columns.output_tokens)
    return {
        "kwh": joules / 3.6e6,
        "mean_kw": joules / run.end / 1e3 if run.end else None,
        "joules_per_output_token": joules / output_tokens if output_tokens else None,
        "error": ERROR,
    }


SIGNIFICANT = 2.5
"""Number of standard deviations by which arrivals must outnumber starts.

While a queue is backlogged, arrivals less starts is a random walk, whose variance is about arrivals plus starts where
both come as from Poisson processes. Of 400 M/M/1 runs of 2,000 requests, none is called overloaded at loads up to 0.95,
3 % at 1.0, 26 % at 1.05, 78 % at 1.1 and all at 1.2. Shorter runs show less: of 300 requests, 50 % at 1.2, 99 % at 1.5.
"""

BACKLOGGED = 0.5
"""Share of the time between the first and the last arrival in which the queue must not have been empty.

A queue with a load below 1 empties again and again. A queue left by a burst late in a trace does not grow with the
length of the run.
"""


def overload(run: Run, plan: ServingPlan) -> dict[str, Any] | None:
    """The first pool whose queue grows for as long as requests arrive (`overload_of`); None if there is none.

    `drain`: seconds from the last arrival to the end of the run. Clients of a closed loop wait for their answers before
    they send again, so they cannot overload a system.
    """
    if isinstance(plan.scenario.workload.arrivals, ClosedLoopSpec):
        return None
    backlogs = {engine.name: engine.backlog for engine in run.engines}
    pools = (overload_of({name: backlogs[name] for name in names}) for names in plan.groups)
    first = next(filter(None, pools), None)
    if first is None:
        return None
    last = max(run.columns.arrival)
    return first | {"arrivals_end": last, "drain": run.end - last}


def overload_of(backlogs: dict[str, Backlog]) -> dict[str, Any] | None:
    """The overload of a pool, from the queues of its engines by name; None if they do not grow.

    Queues grow if, at the last arrival, they had not been empty for half of the arrivals' time (`BACKLOGGED`), and
    arrivals since then outnumber starts by more than chance explains (`SIGNIFICANT`). Requests that arrive all at once
    have no rate. An engine whose batch still fills when arrivals end is not overloaded, since no request waits.

    Returns the engines' names, requests that arrive and that start a second, and those that wait at the last arrival.
    """
    seconds, backlogged, waiting, arrived, engines = 0.0, 0.0, 0, 0, 0
    for backlog in backlogs.values():
        if backlog.first is not None and backlog.last is not None:
            time, arrivals, starts, emptied, before = backlog.last
            seconds += time - backlog.first
            backlogged += time - emptied
            waiting += arrivals - starts
            arrived += arrivals - before
            engines += 1
    started = arrived - waiting
    if not backlogged or backlogged < BACKLOGGED * seconds or waiting <= SIGNIFICANT * sqrt(arrived + started):
        return None
    rates = engines / backlogged
    return {
        "engines": list(backlogs),
        "arrival_rate": arrived * rates,
        "service_rate": started * rates,
        "waiting": waiting,
    }


Document = dict[str, Any]

SCHEMA = "twin.simulation/1"
NOTE = "Simulated (discrete events, no hardware)."


def report_run(run: Run, plan: ServingPlan) -> Document:
    """The report of a run, which is kept without its records."""
    summary = summarise(run, plan.scenario.measure)
    if run.columns.clients:
        summary |= summarise_clients(run, plan)
    if len(plan.pools) > 1:
        summary |= summarise_pools(run, plan, summary["duration"])
    devices, throughput = describe_devices(plan.pools), summary["output_throughput"]
    scaled: Document = {}
    if run.scaling is not None:
        devices = mean_devices(run, plan.pools)
        summary["autoscaling"] = scaling_summary(run, plan)
        scaled = {"autoscaling": scaling_document(run, plan)}
    if plan.scenario.failures:
        summary["outages"] = around_outages(run, plan.scenario.measure)
    energy = energy_summary(run, plan)
    if energy is not None:
        summary["energy"] = energy
    cost = None if devices is None else cost_per_million_tokens(devices, throughput)
    if devices is not None and throughput is not None:
        summary |= {"output_throughput_per_device": throughput / devices["total"]}
    return {
        "summary": summary if cost is None else summary | {"cost_per_million_output_tokens": cost},
        "engines": engine_summaries(run),
        "links": link_summaries(run),
        "outages": outages(run),
        "overload": overload(run, plan),
        "outside": run.outside,
        **scaled,
    }


def run_document(plan: ServingPlan, settings: Settings, report: Document) -> Document:
    """The document of a plan that was run once. `settings`: fields changed in its scenario."""
    return {
        "schema": SCHEMA,
        "name": plan.scenario.name,
        "simulated": True,
        "note": NOTE,
        "settings": settings,
        **describe(plan),
        "replications": 1,
        "draws": 0,
        "summary": report["summary"],
        "intervals": {},
        "assumptions": [],
        "engines": report["engines"],
        "links": report["links"],
        "outages": report["outages"],
        "outside": report["outside"],
        "saturated": report["overload"] is not None,
        "overload": report["overload"],
        **({"autoscaling": report["autoscaling"]} if "autoscaling" in report else {}),
    }


def run_inputs(plans: Sequence[ServingPlan], replications: int, draws: int | None) -> Document:
    """The entries of the manifest of runs."""
    return {
        "scenarios": [plan.scenario.model_dump(mode="json", by_alias=True) for plan in plans],
        "replications": replications,
        "draws": draws,
        "seed": plans[0].scenario.seed,
        "step_time": [plan.scenario.step_time.provenance() for plan in plans],
        "trace": plans[0].trace_name,
    }


def run_fingerprint(
    plans: Sequence[ServingPlan], version: str, replications: int, draws: int | None, *more: object
) -> str:
    """A digest of `version` and of everything that the results of runs depend on."""
    identity = [
        [
            plan.scenario.model_dump(mode="json"),
            str(plan.base),
            plan.trace_digest,
            plugin_digest(plan.scenario.plugins, plan.base),
        ]
        for plan in plans
    ]
    return fingerprint([version, identity, replications, draws, *more])


Floats = NDArray[np.float64]

POINTS = 101
"""Number of quantiles of a curve."""

SAMPLES = 400
"""Number of instants of a time series."""


def timeseries(run: Run, measure: MeasureSpec) -> dict[str, Any]:
    """Quantiles of every latency, seconds, also by class, and time series over all engines at even instants.

    The series are `running` and `waiting` requests, `kv_used`, the share of KV blocks in use, and, of an autoscaled
    run, `engines` in each state. Needs a run with detail.
    """
    latencies = RequestLatencies(run.columns, measure)
    gaps, weights = pooled_gaps(run.logs, measure)
    curves = {name: curve(values) for name, values in latencies.of(latencies.in_window).items()}
    curves["itl"] = _weighted_quantiles(gaps, weights)
    instants = np.linspace(0.0, run.end, SAMPLES)
    running, waiting, blocks_in_use = (np.zeros(SAMPLES) for _ in range(3))
    blocks = sum(engine.blocks for engine in run.engines)
    for engine in run.engines:
        changes = engine.log.states()
        if not len(changes):
            continue
        at = np.searchsorted(changes[:, 0], instants, side="right") - 1
        started = at >= 0
        running += np.where(started, changes[at, 1], 0)
        waiting += np.where(started, changes[at, 2], 0)
        blocks_in_use += np.where(started, engine.blocks - changes[at, 3], 0) / blocks
    series: dict[str, Any] = {
        "quantiles": {"p": np.linspace(0, 1, POINTS).tolist(), **curves},
        "classes": _classes(run.columns, latencies),
        "time": instants.tolist(),
        "running": running.tolist(),
        "waiting": waiting.tolist(),
        "kv_used": blocks_in_use.tolist(),
    }
    if run.scaling is not None:
        states = sum(states_at(log, instants) for log in run.scaling)
        series["engines"] = dict(zip(STATES[1:], np.asarray(states).T.tolist(), strict=True))
    return series


def _classes(columns: Columns, latencies: RequestLatencies) -> dict[str, Any] | None:
    """Requests, spreads and quantiles of latencies of each class of requests; None where there is one class.

    A class has one model, task, service class and tenant, and is named by what tells it from the others.
    """
    kind = np.asarray(columns.kind)
    names: list[tuple[str, ...]] = list(columns.kinds)
    if columns.clients:
        kind = kind * len(columns.clients) + np.asarray(columns.client)
        names = [pair + client for pair in columns.kinds for client in columns.clients]
    present = set(np.unique(kind).tolist())
    kinds = {index: parts for index, parts in enumerate(names) if index in present}
    if len(kinds) < 2:
        return None
    varies = [len(set(parts)) > 1 for parts in zip(*kinds.values(), strict=True)]
    summaries: dict[str, Any] = {}
    for index, parts in sorted(kinds.items(), key=lambda item: item[1]):
        mask = latencies.in_window & (kind == index)
        name = " ".join(part for part, several in zip(parts, varies, strict=True) if several)
        quantiles = {name: curve(values) for name, values in latencies.of(mask).items()}
        summaries[name] = latencies.group(mask) | {"quantiles": quantiles}
    return summaries


def curve(values: Floats) -> list[float] | None:
    """Evenly spaced quantiles of an empirical distribution; None for an empty one."""
    return quantiles(values, np.linspace(0, 1, POINTS)).tolist() if len(values) else None


def _weighted_quantiles(values: Floats, weights: NDArray[np.int64]) -> list[float] | None:
    positive = weights > 0
    values, weights = values[positive], weights[positive]
    if not len(values):
        return None
    order = np.argsort(values)
    through = np.cumsum(weights[order])
    ranks = np.linspace(0, 1, POINTS) * (through[-1] - 1)
    quantiles: list[float] = values[order][np.searchsorted(through, ranks, side="right")].tolist()
    return quantiles


FIELDS = ("queued_ts", "first_token_ts", "last_token_ts", "output_toks")


def read_reference_run(requests: Path, timeseries: Path | None = None) -> dict[str, Any]:
    """Read a measured run and compute its metrics; `BadInput` names a file and line that cannot be used.

    `requests` has a JSON object a line with `queued_ts`, `first_token_ts` and `last_token_ts` in seconds of one clock,
    and `output_toks`. `timeseries` is a CSV with the columns t, running and waiting. TTFT and E2E count from
    `queued_ts`.
    """
    queued, first, last, tokens = _read(requests)
    several = tokens > 1
    latencies = {"ttft": first - queued, "tpot": (last - first)[several] / (tokens[several] - 1), "e2e": last - queued}
    seconds = float(last.max() - queued.min())
    document: dict[str, Any] = {
        "source": requests.parent.name + "/" + requests.name,
        "requests": len(queued),
        "summary": {name: spread(values) for name, values in latencies.items()}
        | {"output_throughput": float(tokens.sum()) / seconds},
        "quantiles": {"p": np.linspace(0, 1, POINTS).tolist()}
        | {name: curve(values) for name, values in latencies.items()},
    }
    return document | (_timeseries(timeseries) if timeseries else {})


def compare(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The measured and the predicted value, and the relative error, of each metric that both have."""
    values = flatten(predicted)
    return {
        name: {"measured": value, "predicted": values[name], "error": values[name] / value - 1}  # type: ignore[operator]
        for name, value in flatten(measured).items()
        if value and values.get(name) is not None
    }


def _read(file: Path) -> tuple[Floats, Floats, Floats, Floats]:
    with readable(file):
        text = file.read_text(encoding="utf-8")
    table = np.array([row for _, row in number_lines(file, text, FIELDS)])
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _timeseries(file: Path) -> dict[str, list[float]]:
    import csv

    try:
        with file.open(encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        return {
            "time": [float(row["t"]) for row in rows],
            "running": [float(row["running"]) for row in rows],
            "waiting": [float(row["waiting"]) for row in rows],
        }
    except OSError as error:
        raise BadInput(f"expected a readable file: {error.strerror}", file=file) from None
    except (ValueError, KeyError, TypeError):
        raise BadInput("expected a CSV with the numeric columns t, running and waiting", file=file) from None
