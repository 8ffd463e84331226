"""The table of a serving sweep, for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from reports.fitting_table import Column, FittingTable
from reports.serving.table import at, change, milliseconds, number, sweep_footnote, warnings
from reports.settings import fixed, in_words, short_names, varying

Document = dict[str, Any]

FEW = 4
"""Configurations that a warning names."""


MEANING = "user tok/s: 1 / mean TPOT. Δ: against the first row."
INTERVALS = "±: half a 95 % interval of the mean, relative to it."


@dataclass(frozen=True)
class Metric:
    """A column: its title, the metric's dotted name in a summary, how it is shown, and `Column.rank`.

    `is_change`: the change against the first row is shown in place of the value. `of_devices`: an entry of the
    document's `devices`, not of its summary.
    """

    title: str
    name: str
    rank: int
    show: Callable[[float | None], str] = milliseconds
    invert: bool = False
    is_change: bool = False
    of_devices: bool = False


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.3g} %"


METRICS = (
    Metric("TTFT mean", "ttft.mean", 2),
    Metric("TTFT P99", "ttft.p99", 1),
    Metric("TPOT mean", "tpot.mean", 1),
    Metric("TPOT P99", "tpot.p99", 2),
    Metric("ITL P99", "itl.p99", 6),
    Metric("user tok/s", "tpot.mean", 4, number, invert=True),
    Metric("Δ user", "tpot.mean", 6, invert=True, is_change=True),
    Metric("output tok/s", "output_throughput", 0, number),
    Metric("Δ output", "output_throughput", 4, is_change=True),
    Metric("goodput/s", "goodput", 1, number),
    Metric("in SLO", "goodput_share", 3, _share),
    Metric("load", "load", 3, _share),
    Metric("session s", "sessions.time.mean", 3, number),
    Metric("resent cached", "sessions.resent_cached", 2, _share),
    Metric("GPU-hours", "autoscaling.gpu_hours", 1, number),
    Metric("cost", "autoscaling.cost", 1, number),
    Metric("minutes missed", "autoscaling.missed_minutes", 1, _share),
    Metric("GPUs", "total", 1, number, of_devices=True),
    Metric("tok/s/GPU", "output_throughput_per_device", 3, number),
    Metric("cost/h", "cost_per_hour", 3, number, of_devices=True),
    Metric("cost/M tokens", "cost_per_million_output_tokens", 2, number),
)


def sweep_table(document: Document) -> RenderableType:
    """The settings that all rows share, then one row for each configuration; intervals where there are several runs.

    Configurations that cannot run are the last rows; lines below the table say why.
    """
    points, infeasible = document["points"], document.get("infeasible") or []
    settings = [each["settings"] for each in [*points, *infeasible]]
    shared = fixed(settings)
    keys = varying(settings)
    columns = [
        Column(title, [str(each[key]) for each in settings]) for key, title in zip(keys, short_names(keys), strict=True)
    ]
    shown = [metric for metric in METRICS if any(_stated(metric, point) is not None for point in points)]
    empty = ["–"] * len(infeasible)
    if infeasible:
        columns.append(Column("", [""] * len(points) + ["infeasible"] * len(infeasible)))
    columns += [Column(metric.title, _cells(metric, points) + empty, metric.rank) for metric in shown]
    notes = [Text(line, style="bold red") for line in warning_lines(points, keys)]
    notes += [Text(line) for line in note_lines(points, keys)]
    notes += [Text(text) for text in infeasible_lines(infeasible, keys)]
    title = Text(f"{document['name']} with {shared}" if shared else document["name"], style="bold")
    footnote = f"{sweep_footnote(points)} {MEANING}"
    if any(point["intervals"] for point in points):
        footnote += f" {INTERVALS}"
    return Group(title, FittingTable(columns), Text(footnote, style="dim"), *notes)


def warning_lines(points: Sequence[Document], keys: Sequence[str]) -> list[str]:
    """A line for each warning, with the configurations that it is about."""
    return _by_text([(text, point) for point in points for text in warnings(point)], len(points), keys)


def note_lines(points: Sequence[Document], keys: Sequence[str]) -> list[str]:
    """A line for each note on step times, with the configurations that it is about."""
    notes = [(text, point) for point in points for text in point["step_time"].get("notes", ())]
    return _by_text(notes, len(points), keys)


def _by_text(texts: Sequence[tuple[str, Document]], count: int, keys: Sequence[str]) -> list[str]:
    """Each text once, after the settings of its configurations unless these are all."""
    settings: dict[str, list[str]] = {}
    for text, point in texts:
        settings.setdefault(text, []).append(in_words(point["settings"], keys))
    return [
        text if len(named) == count else f"{'; '.join(named[:FEW])}{_more(len(named) - FEW)}: {text}"
        for text, named in settings.items()
    ]


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def infeasible_lines(infeasible: Sequence[Document], keys: Sequence[str]) -> list[str]:
    """A line for each reason, with the settings that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for each in infeasible:
        by_reason.setdefault(each["reason"], []).append(in_words(each["settings"], keys))
    return [f"infeasible: {'; '.join(settings)}: {reason}" for reason, settings in by_reason.items()]


def _cells(metric: Metric, points: Sequence[Document]) -> list[str]:
    values = [_value(metric, point) for point in points]
    if metric.is_change:
        return ["–" if value is None else change(value, values[0]) for value in values]
    return [
        metric.show(value) + ("" if metric.invert else _half_interval(point, metric.name))
        for value, point in zip(values, points, strict=True)
    ]


def _value(metric: Metric, point: Document) -> float | None:
    value = _stated(metric, point)
    if not metric.invert or value is None:
        return value
    return 1 / value if value else None


def _stated(metric: Metric, point: Document) -> float | None:
    """The value in the document."""
    if metric.of_devices:
        return (point.get("devices") or {}).get(metric.name)
    return at(point["summary"], metric.name)


def _half_interval(point: Document, name: str) -> str:
    """Half the 95 % interval of a metric's expectation, relative to it."""
    interval, value = point["intervals"].get(name), at(point["summary"], name)
    if interval is None or not value:
        return ""
    low, high = interval["confidence"]
    return f" ±{100 * (high - low) / 2 / abs(value):.2g} %"
