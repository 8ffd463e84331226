"""Settings of a sweep's configurations, and fields of its points: their names, units and meanings.

Settings that vary name the rows, those that are fixed are stated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Settings = Mapping[str, Any]

SHARES = ("fleet.goals_met", "fleet.periods_met")
"""Metrics of a validation that are shares: their errors are differences, in points."""


def varying(configurations: Sequence[Settings]) -> list[str]:
    """Keys that have more than one value, in the order given."""
    first = configurations[0]
    return [key for key in first if any(settings[key] != first[key] for settings in configurations)]


def fixed(configurations: Sequence[Settings]) -> str:
    """The settings that all configurations share, in words; "" if there are none."""
    keys = varying(configurations)
    return in_words(configurations[0], [key for key in configurations[0] if key not in keys])


def in_words(settings: Settings, keys: Iterable[str]) -> str:
    """Settings in words: `batch_size=128, seed=2`."""
    return ", ".join(f"{key}={settings[key]}" for key in keys)


def short_names(keys: Sequence[str]) -> list[str]:
    """The shortest last parts of dotted keys that are all different."""
    return [_short(key, [rival for rival in keys if rival != key]) for key in keys]


def _short(key: str, rivals: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        ending = ".".join(parts[-count:])
        if not any(f".{rival}".endswith(f".{ending}") for rival in rivals):
            return ending
    return key


def axis_and_lines(configurations: Sequence[Settings]) -> tuple[str, list[str]] | None:
    """The setting to draw points over, and those that tell lines apart; None if nothing varies.

    The first is the number with the most values, or, without numbers, the first that varies. A setting that follows
    from it tells no lines apart.
    """
    keys = varying(configurations) if configurations else []
    if not keys:
        return None
    counts = {key: len({str(settings[key]) for settings in configurations}) for key in keys}
    axis = max(
        [key for key in keys if is_number(settings[key] for settings in configurations)] or keys[:1],
        key=counts.__getitem__,
    )
    pairs = {key: len({(str(settings[axis]), str(settings[key])) for settings in configurations}) for key in keys}
    return axis, [key for key in keys if key != axis and pairs[key] > counts[axis]]


def is_number(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


Value = float | str | None

LATENCIES = {
    "ttft": ("TTFT", "Time from submission to the first token"),
    "tpot": ("TPOT", "Time per output token after the first: (E2E − TTFT)/(n − 1) of a request with n > 1 tokens"),
    "itl": ("ITL", "Gap between consecutive tokens, pooled over requests"),
    "e2e": ("E2E", "Time from submission to the last token"),
}
POINTS = {
    "mean": ("mean", "mean over requests"),
    "p50": ("P50", "half of the requests are below"),
    "p90": ("P90", "90 % are below"),
    "p95": ("P95", "95 % are below"),
    "p99": ("P99", "99 % are below"),
}

SPAN_OF_LOG = 30.0
"""Positive values that span more than this factor are shown on a logarithmic axis at first."""


@dataclass(frozen=True)
class Field:
    """A field of points, one value a point or None, with its label, unit and meaning.

    `better`: 1 if more of it is better, -1 if less is, 0 if neither. `goal`: a limit that a user set. `setting`: a user
    chose the values.
    """

    key: str
    label: str
    values: Sequence[Value]
    help: str = ""
    better: int = 0
    goal: float | None = None
    setting: bool = False

    @property
    def is_number(self) -> bool:
        """True if its values are numbers, so that an axis has a scale."""
        return is_number(value for value in self.values if value is not None)

    @property
    def categories(self) -> list[str]:
        """Its different values as texts, in the order of their first occurrence."""
        return list(dict.fromkeys(str(value) for value in self.values if value is not None))

    @property
    def spans_decades(self) -> bool:
        """True if a linear axis would hide all but the largest values."""
        values = [value for value in self.values if isinstance(value, int | float)]
        return bool(values) and self.is_number and min(values) > 0 and max(values) / min(values) > SPAN_OF_LOG


@dataclass(frozen=True)
class Metric:
    """A metric of a summary: its label, meaning, and whether more (1) or less (-1) of it is better."""

    label: str
    help: str
    better: int = 0


METRICS = {
    "output_throughput": Metric("output tokens/s", "Output tokens per second of the whole system", 1),
    "output_throughput_per_device": Metric("output tokens/s/GPU", "Output tokens per second and device", 1),
    "user": Metric("tokens/s/user", "Interactivity: 1 / mean TPOT, the tokens per second that one user sees", 1),
    "request_throughput": Metric("requests/s", "Finished requests per second", 1),
    "goodput": Metric("goodput, requests/s", "Requests per second that meet every goal", 1),
    "goodput_share": Metric("share in SLO", "Share of the requests that meet every goal", 1),
    "cost_per_million_output_tokens": Metric("cost/M tokens", "Price per hour over output tokens per hour", -1),
    "devices": Metric("GPUs", "Devices in all", -1),
    "cost_per_hour": Metric("cost/h", "Price of the devices per hour", -1),
    "autoscaling.gpu_hours": Metric("GPU-hours", "Time for which devices are paid, from starts to stops", -1),
    "autoscaling.cost": Metric("cost", "Price of the GPU-hours", -1),
    "autoscaling.missed_minutes": Metric("minutes missed", "Minutes in which over 1 % of requests miss a goal", -1),
    "busy": Metric("busy", "Share of the time in which an engine is in a step, mean over engines"),
    "load": Metric("load", "Running sequences over max_num_seqs: how full batches are"),
    "kv_used": Metric("KV in use", "Share of KV blocks in use, mean over time and engines"),
    "cached_tokens": Metric("cached tokens", "Prompt tokens that prefix caches spared"),
    "prefix_cache.hit_rate": Metric("prefix hit rate", "Share of prompt tokens that prefix caches supplied", 1),
    "speculation.acceptance_rate": Metric("acceptance rate", "Accepted over draft tokens", 1),
    "speculation.mean_acceptance_length": Metric("accepted length", "Tokens that a decode with a draft emits", 1),
    "preemptions": Metric("preemptions", "How often a running sequence lost its blocks and began again", -1),
    "requests": Metric("requests", "Requests that count"),
    "sessions.time.mean": Metric("session mean, s", "From a session's first request to its last answer", -1),
    "sessions.time.p99": Metric("session P99, s", "From a session's first request to its last answer", -1),
    "sessions.waited.mean": Metric("session waited, s", "The part of a session without think times and tool calls", -1),
    "sessions.turns": Metric("turns", "Turns of a session, mean"),
    "sessions.resent_share": Metric("resent share", "Share of prompt tokens that their session had sent before"),
    "sessions.resent_cached": Metric("resent cached", "Share of the resent tokens that prefix caches supplied", 1),
} | {
    f"{name}.{point}": Metric(f"{label} {short}, s", f"{meaning}; {point_meaning}", -1)
    for name, (label, meaning) in LATENCIES.items()
    for point, (short, point_meaning) in POINTS.items()
}  # fmt: skip
"""Metrics of a serving summary by dotted name; `user`, `devices` and `cost_per_hour` are derived."""


def at(summary: Mapping[str, Any], name: str) -> float | None:
    """A metric by its dotted name; None where the summary has none."""
    value: Any = summary
    for part in name.split("."):
        value = value.get(part) if value else None
    return value  # type: ignore[no-any-return]


def setting_fields(settings: Sequence[Mapping[str, Any]]) -> list[Field]:
    """A field for each setting that has more than one value."""
    keys = varying(settings) if settings else []
    names = short_names(keys)
    return [
        _numbers_or_texts(Field(key, name, [row[key] for row in settings], f"Setting {key}", setting=True))
        for key, name in zip(keys, names, strict=True)
    ]


def metric_fields(values: Mapping[str, Sequence[Value]], goals: Mapping[str, float] | None = None) -> list[Field]:
    """A field for each metric of `METRICS` that some point has."""
    return [
        Field(key, metric.label, list(values[key]), metric.help, metric.better, (goals or {}).get(key))
        for key, metric in METRICS.items()
        if key in values and any(value is not None for value in values[key])
    ]


def _numbers_or_texts(field: Field) -> Field:
    if field.is_number:
        return field
    return replace(field, values=[None if value is None else str(value) for value in field.values])
