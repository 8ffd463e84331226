"""Results as pandas DataFrames. Columns and units stand in docs/reference/python.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scenarios.fields import MeasureSpec
from twin.serving.records.engine_log import EngineLog
from twin.serving.records.requests import KEPT_COLUMNS
from twin.serving.results.summary import RequestLatencies, Run
from twin.serving.results.uncertainty import flatten

Document = dict[str, Any]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
POINTS = ("mean", "p50", "p90", "p95", "p99")
SECONDS, TOKENS, REQUESTS, SHARE, COUNT = "s", "tokens", "requests", "share", "count"
UNITS = {
    **dict.fromkeys((*LATENCIES, "duration"), SECONDS),
    **dict.fromkeys(("output_tokens", "prefill_tokens", "cached_tokens"), TOKENS),
    "output_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "goodput": "requests/s",
    "requests": REQUESTS,
    **dict.fromkeys(("busy", "load", "kv_used", "littles_law_error"), SHARE),
    **dict.fromkeys(("preemptions", "steps"), COUNT),
}
"""Units of the metrics of a serving summary; of a latency, for its mean and all percentiles."""

SESSION_UNITS = {
    **dict.fromkeys(("time", "waited"), SECONDS),
    **dict.fromkeys(("resent_share", "resent_cached"), SHARE),
    **dict.fromkeys(("count", "turns", "requests"), COUNT),
    "resent_tokens": TOKENS,
}
"""Units of the metrics of sessions."""

GROUP_UNITS = {
    **dict.fromkeys(LATENCIES, SECONDS),
    **dict.fromkeys(("requests", "shed"), REQUESTS),
    **dict.fromkeys(("goals_met", "shed_share", "goodput_share"), SHARE),
    "service": TOKENS,
}
"""Units of the metrics of service classes, tenants, and requests around outages."""

SCALING_UNITS = {
    **dict.fromkeys(("engine_hours", "gpu_hours"), "h"),
    **dict.fromkeys(("started", "stopped", "mean_engines", "most_engines"), COUNT),
    "missed_minutes": SHARE,
}
"""Units of the metrics of autoscaling; a cost has that of the prices."""

SECTIONS = {
    "sessions": (SESSION_UNITS, 1),
    **dict.fromkeys(("service_classes", "tenants", "outages"), (GROUP_UNITS, 2)),
    "autoscaling": (SCALING_UNITS, -1),
}
"""Units of the metrics of a section, by a part of their dotted names."""


def summary_frame(document: Document) -> pd.DataFrame:
    """One row for each metric of a `twin.simulation/1` document, its dotted name as the index."""
    rows = {
        name: {"value": value, "unit": _unit(name), **_ends(document["intervals"].get(name))}
        for name, value in metrics(document["summary"]).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("metric")


def _unit(name: str) -> str:
    """The unit of a metric, by its dotted name; empty for one that is not known."""
    parts = name.split(".")
    units, part = SECTIONS.get(parts[0], (UNITS, 0))
    return units.get(parts[part], "") if part < len(parts) else ""


def metrics(summary: Document) -> dict[str, float | None]:
    """Metrics of a serving summary by dotted name; a latency that no request has is NaN in each of its points."""
    every = dict.fromkeys(POINTS, np.nan)
    return flatten({key: every if key in LATENCIES and value is None else value for key, value in summary.items()})


def _ends(interval: dict[str, list[float]] | None) -> dict[str, float]:
    return {
        f"{kind}_{end}": np.nan if interval is None else interval[kind][index]
        for kind in ("confidence", "prediction")
        for index, end in enumerate(("low", "high"))
    }


def requests_frame(run: Run, measure: MeasureSpec) -> pd.DataFrame:
    """One row for each request, in the order in which they finished; fewer columns for a run without detail."""
    columns = run.columns
    if columns.detail:
        table = run.request_table()
    else:
        table = {name: np.array(getattr(columns, name)) for name in KEPT_COLUMNS} | columns.client_table()
        table |= {"output_tokens": table["output_tokens"].astype(int), "one_shot": table["one_shot"].astype(bool)}
    latencies = RequestLatencies(columns, measure)
    return pd.DataFrame({**table, **latencies.values, "counted": latencies.in_window})


def steps_frame(logs: Sequence[EngineLog]) -> pd.DataFrame:
    """One row for each step, engine by engine and in order."""
    tables = [pd.DataFrame({"engine": log.name, **step_table(log)}) for log in logs]
    return pd.concat(tables, ignore_index=True)


KINDS = np.array(["decode", "mixed", "one-shot"])
"""Names of `DECODE_STEP`, `MIXED_STEP` and `ONE_SHOT_STEP`."""


def step_table(log: EngineLog) -> dict[str, NDArray[Any]]:
    """One row for each step of an engine, in order. Needs a log with detail.

    A fast-forwarded step is a decode step without prompt tokens that starts at the end of the step before: nothing
    else is fast-forwarded.

    Returns:
        `start` and `end` (seconds), `kind` (of `KINDS`), `num_decodes` (sequences with a token in this step and in the
        step before it), `prefill_tokens` (prompt tokens computed), `fast_forwarded`.
    """
    ends = np.array(log.ends, dtype=np.float64)
    logged = np.array(log.index, dtype=np.int64)
    start = np.concatenate([[np.nan], ends[:-1]])[: len(ends)]
    start[logged] = log.starts
    prefill_tokens, kind = (np.zeros(len(ends), dtype=np.int64) for _ in range(2))
    prefill_tokens[logged] = log.prefill_tokens
    kind[logged] = log.kinds
    fast_forwarded = np.ones(len(ends), dtype=np.bool_)
    fast_forwarded[logged] = False
    decodes, repeats = np.array(log.decodes, dtype=np.int64), np.array(log.repeats, dtype=np.int64)
    return {
        "start": start,
        "end": ends,
        "kind": KINDS[kind],
        "num_decodes": np.repeat(decodes, repeats),
        "prefill_tokens": prefill_tokens,
        "fast_forwarded": fast_forwarded,
    }


def serving_points(document: Document) -> pd.DataFrame:
    """One row for each configuration of a `twin.serving-sweep/1` document."""
    rows = []
    for index, point in enumerate(document["points"]):
        row: Document = {"configuration": index, **point["settings"], **metrics(point["summary"])}
        for name, interval in point["intervals"].items():
            row |= dict(zip((f"{name}.low", f"{name}.high"), interval["confidence"], strict=True))
        rows.append(row | {"saturated": point["saturated"]})
    return pd.DataFrame(rows)


def bundle_points(document: Document) -> pd.DataFrame:
    """One row for each configuration and ratio of a `twin.sweep/1` document."""
    settings = [configuration["settings"] for configuration in document["configurations"]]
    return pd.DataFrame([dict(_bundle_point(point, settings)) for point in document["points"]])


def _bundle_point(point: Document, settings: Sequence[Document]) -> Iterator[tuple[str, Any]]:
    yield "configuration", point["configuration"]
    yield from settings[point["configuration"]].items()
    for key, value in point.items():
        if key == "throughput_ci":
            low, high = value or (np.nan, np.nan)
            yield from (("throughput_ci_low", low), ("throughput_ci_high", high))
        elif isinstance(value, dict):
            yield from ((f"{key}.{name}", number) for name, number in value.items())
        elif key == "seed":  # the scenario's field of this name may be among the settings
            yield "point_seed", value
        elif key not in ("configuration", "gaps"):
            yield key, value
