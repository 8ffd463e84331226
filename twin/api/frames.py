"""Results as pandas DataFrames. Columns and units stand in docs/reference/python.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from scenarios.fields import MeasureSpec
from twin.serving.records.engine_log import EngineLog
from twin.serving.records.requests import Columns
from twin.serving.results.curves import step_table
from twin.serving.results.run import Run
from twin.serving.results.summary import RequestLatencies
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
"""Units of the metrics of sessions, by the second part of their names."""

CLIENT_UNITS = {**dict.fromkeys(LATENCIES, SECONDS), "requests": REQUESTS, "goals_met": SHARE, "service": TOKENS,
    "shed": REQUESTS, "shed_share": SHARE,
}  # fmt: skip
"""Units of the metrics of service classes and tenants, by the third part of their names."""


SCALING_UNITS = {
    **dict.fromkeys(("engine_hours", "gpu_hours"), "h"),
    **dict.fromkeys(("started", "stopped", "mean_engines", "most_engines"), COUNT),
    "missed_minutes": SHARE,
}
"""Units of the metrics of autoscaling, by the last part of their names; a cost has that of the prices."""

OUTAGE_UNITS = {**dict.fromkeys(LATENCIES, SECONDS), "requests": REQUESTS, "goodput_share": SHARE}
"""Units of the metrics around outages, by the third part of their names."""


def summary_frame(document: Document) -> pd.DataFrame:
    """One row for each metric of a `twin.simulation/1` document, its dotted name as the index."""
    rows = {
        name: {"value": value, "unit": _unit(name), **_ends(document["intervals"].get(name))}
        for name, value in metrics(document["summary"]).items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("metric")


def _unit(name: str) -> str:
    """The unit of a metric, by its dotted name; empty for one that is not known."""
    section, _, rest = name.partition(".")
    if section == "autoscaling":
        return SCALING_UNITS.get(name.split(".")[-1], "")
    if section in ("service_classes", "tenants", "outages") and rest:
        units = OUTAGE_UNITS if section == "outages" else CLIENT_UNITS
        return units.get(rest.split(".")[1], "")
    return SESSION_UNITS[rest.partition(".")[0]] if section == "sessions" else UNITS.get(section, "")


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
    table = run.request_table() if columns.detail else _without_detail(columns)
    latencies = RequestLatencies(columns, measure)
    return pd.DataFrame({**table, **latencies.values, "counted": latencies.in_window})


def _without_detail(columns: Columns) -> dict[str, Any]:
    return {
        "arrival": np.array(columns.arrival),
        "queued": np.array(columns.queued),
        "first_token": np.array(columns.first_token),
        "last_token": np.array(columns.last_token),
        "output_tokens": np.array(columns.output_tokens, dtype=np.int64),
        "one_shot": np.array(columns.one_shot, dtype=np.bool_),
    } | columns.client_table()


def steps_frame(logs: Sequence[EngineLog]) -> pd.DataFrame:
    """One row for each step, engine by engine and in order."""
    tables = [pd.DataFrame({"engine": log.name, **step_table(log)}) for log in logs]
    return pd.concat(tables, ignore_index=True)


def serving_points(document: Document) -> pd.DataFrame:
    """One row for each configuration of a `twin.serving-sweep/1` document."""
    return pd.DataFrame([_serving_point(index, point) for index, point in enumerate(document["points"])])


def _serving_point(index: int, point: Document) -> Document:
    row: Document = {"configuration": index, **point["settings"], **metrics(point["summary"])}
    for name, interval in point["intervals"].items():
        row |= {f"{name}.low": interval["confidence"][0], f"{name}.high": interval["confidence"][1]}
    return row | {"saturated": point["saturated"]}


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
