"""Curves of a run (quantiles of latencies, requests over time, steps), and a measured run to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import quantiles, spread
from scenarios.fields import MeasureSpec
from twin.serving.records.requests import Columns
from twin.serving.results.run import Run
from twin.serving.results.summary import RequestLatencies, pooled_gaps
from twin.serving.results.uncertainty import flatten
from workloads.errors import BadInput, readable
from workloads.json_files import number_lines

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
        from twin.serving.results.scaling_summary import STATES, states_at

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
        summaries[name] = {
            "requests": int(mask.sum()),
            **latencies.spreads(mask),
            "quantiles": {name: curve(values) for name, values in latencies.of(mask).items()},
        }
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
    """Read a measured run and compute its metrics.

    `requests` has a JSON object a line with `queued_ts`, `first_token_ts` and `last_token_ts` in seconds of one clock,
    and `output_toks`. `timeseries` is a CSV with the columns t, running and waiting. TTFT and E2E count from
    `queued_ts`.

    Raises:
        BadInput: the file or one of its lines cannot be used; it names both.
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
