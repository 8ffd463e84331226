"""The report of a serving sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reports.blocks import (
    Block,
    Chart,
    Column,
    Curve,
    Document,
    Figure,
    Points,
    Report,
    Shown,
    Table,
    Text,
    View,
    texts,
)  # fmt: skip
from reports.fields import METRICS as FIELDS
from reports.fields import (
    SPAN_OF_LOG,
    Field,
    at,
    axis_and_lines,
    fixed,
    in_words,
    is_number,
    metric_fields,
    setting_fields,
    short_names,
    varying,
)
from reports.serving_sentences import POINTS, change, milliseconds, number, sweep_footnote, warnings

FEW = 4
"""Configurations that a warning names."""


MEANING = "user tok/s: 1 / mean TPOT. Δ: against the first row."
INTERVALS = "±: half a 95 % interval of the mean, relative to it."


@dataclass(frozen=True)
class Metric:
    """A column: its title, the metric's dotted name in a summary, its format, and `Column.rank`.

    `is_change`: shown against the first row. `of_devices`: an entry of the document's `devices`.
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


def sweep_report(document: Document) -> Report:
    """The settings that all points share, then the points, then configurations that cannot run, with the reason."""
    points, infeasible = document["points"], document.get("infeasible") or []
    settings = [point["settings"] for point in [*points, *infeasible]]
    shared, keys = fixed(settings), varying(settings)
    footnote = f"{sweep_footnote(points)} {MEANING}"
    if any(point["intervals"] for point in points):
        footnote += f" {INTERVALS}"
    blocks: list[Block] = [
        Text(f"{document['name']} with {shared}" if shared else document["name"], "answer"),
        *_points(document, _table(points, infeasible, keys)), Text(footnote, "note"),
        *texts(warning_lines(points, keys), "warning"), *texts(note_lines(points, keys)),
        *texts(infeasible_lines(infeasible, keys)),
    ]  # fmt: skip
    return Report(f"{document['name']}: sweep", blocks)


def _table(points: Sequence[Document], infeasible: Sequence[Document], keys: Sequence[str]) -> Table:
    settings = [point["settings"] for point in [*points, *infeasible]]
    columns = [Column(title) for title in short_names(keys)]
    cells = [[str(row[key]) for row in settings] for key in keys]
    if infeasible:
        columns.append(Column(""))
        cells.append([""] * len(points) + ["infeasible"] * len(infeasible))
    for metric in METRICS:
        if any(_stated(metric, point) is not None for point in points):
            columns.append(Column(metric.title, metric.rank))
            cells.append(_cells(metric, points) + ["–"] * len(infeasible))
    return Table(columns, list(zip(*cells, strict=True)), fits=True)


def _points(document: Document, table: Table) -> list[Block]:
    points = document["points"]
    fields = serving_fields(points)
    keys = {field.key for field in fields}
    metric = next((key for key in ("ttft.p99", "output_throughput") if key in keys), None)
    place = axis_and_lines([point["settings"] for point in points])
    views = _views(metric, place, keys) if metric else []
    blocks: list[Block] = [Points(fields, views, table=table)]
    if not views:
        blocks.append(Text("No request counts in any point.", detail=True))
    return [*blocks, _figure(document, *place)] if place else blocks


def _views(metric: str, place: tuple[str, list[str]] | None, keys: set[str]) -> list[View]:
    axis, line_keys = place or (metric, [])
    colour = line_keys[0] if line_keys else ""
    views = [View("latency", axis, metric, colour)]
    if "output_throughput" in keys:
        views.append(View("throughput", axis, "output_throughput", colour))
    rate = "output_throughput_per_device" if "output_throughput_per_device" in keys else "output_throughput"
    if {"user", rate} <= keys:
        views.append(View("throughput against interactivity", "user", rate, colour or axis, pareto=True))
    return views


def serving_fields(points: Sequence[Document]) -> list[Field]:
    """Settings that vary, and all metrics, of documents of serving runs."""
    values = {key: [_field_value(point, key) for point in points] for key in FIELDS}
    limits = points[0].get("scenario", {}).get("measure", {}).get("slo") or {}
    goals = {f"{name}.{point}": limits[name] for name in limits for point in POINTS}
    fields = [*setting_fields([point["settings"] for point in points]), *metric_fields(values, goals)]
    if any(point.get("saturated") for point in points):
        verdicts = ["overloaded" if point.get("saturated") else "keeps up" for point in points]
        fields.append(Field("#queue", "queue", verdicts, "Whether requests come faster than they are started"))
    return fields


def _field_value(point: Document, key: str) -> float | None:
    if key == "user":
        tpot = at(point["summary"], "tpot.mean")
        return 1 / tpot if tpot else None
    if key in ("devices", "cost_per_hour"):
        return (point.get("devices") or {}).get("total" if key == "devices" else key)
    return at(point["summary"], key)


PANELS = (
    ("output tokens/s", "output_throughput", 1.0, False),
    ("interactivity, tokens/s", "tpot.mean", 1.0, True),
    ("mean TTFT, ms", "ttft.mean", 1e3, False),
    ("P99 ITL, ms", "itl.p99", 1e3, False),
)
"""Panels of the figure: label, metric, factor of its unit, and whether its inverse is drawn."""


def _figure(document: Document, axis: str, line_keys: Sequence[str]) -> Figure:
    charts = []
    for label, name, factor, inverse in PANELS:
        curves = _curves(document["points"], axis, line_keys, name, factor, inverse=inverse)
        heights = [height for curve in curves for height in curve.y if height]
        log = factor > 1 and bool(heights) and max(heights) > SPAN_OF_LOG * min(heights)
        charts.append(Chart("", curves, axis, label, log_y=log))
    return Figure("sweep", charts, document["name"], columns=2, on_page=False)


def _curves(
    points: Sequence[Document], axis: str, line_keys: Sequence[str], name: str, factor: float, *, inverse: bool
) -> list[Curve]:
    numeric = is_number(point["settings"][axis] for point in points)
    lines: dict[str, list[Document]] = {}
    for point in sorted(points, key=lambda point: float(point["settings"][axis])) if numeric else points:
        lines.setdefault(in_words(point["settings"], line_keys), []).append(point)
    curves = []
    for label, line in lines.items():
        places = [point["settings"][axis] if numeric else str(point["settings"][axis]) for point in line]
        values = [at(point["summary"], name) for point in line]
        intervals = [(point["intervals"].get(name) or {}).get("confidence") or (None, None) for point in line]
        low, high = (_scaled([ends[i] for ends in intervals], factor) for i in (0, 1))
        if inverse:
            curves.append(Curve(label, places, [1 / value if value else None for value in values], kind="both"))
        elif all(end is None for end in low):
            curves.append(Curve(label, places, _scaled(values, factor), kind="both"))
        else:
            curves.append(Curve(label, places, _scaled(values, factor), None, "both", low, high))
    return curves


def _scaled(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [None if value is None else factor * value for value in values]


def warning_lines(points: Sequence[Document], keys: Sequence[str]) -> list[str]:
    """A line for each warning, with the configurations that it is about."""
    return _by_text([(text, point) for point in points for text in warnings(point)], len(points), keys)


def note_lines(points: Sequence[Document], keys: Sequence[str]) -> list[str]:
    """A line for each note on step times, with the configurations that it is about."""
    notes = [(text, point) for point in points for text in point["step_time"].get("notes", ())]
    return _by_text(notes, len(points), keys)


def _by_text(texts: Sequence[tuple[str, Document]], count: int, keys: Sequence[str]) -> list[str]:
    settings: dict[str, list[str]] = {}
    for text, point in texts:
        settings.setdefault(text, []).append(in_words(point["settings"], keys))
    return [
        text if len(places) == count else f"{'; '.join(places[:FEW])}{_more(len(places) - FEW)}: {text}"
        for text, places in settings.items()
    ]


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def infeasible_lines(infeasible: Sequence[Document], keys: Sequence[str]) -> list[str]:
    """A line for each reason, with the settings that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for point in infeasible:
        by_reason.setdefault(point["reason"], []).append(in_words(point["settings"], keys))
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


TITLES = {
    "output_throughput": "output tok/s", "goodput": "goodput", "ttft.mean": "TTFT mean", "ttft.p99": "TTFT P99",
    "tpot.mean": "TPOT mean", "tpot.p99": "TPOT P99", "e2e.mean": "E2E mean",
    "cost_per_million_output_tokens": "cost/M tokens", "energy.joules_per_output_token": "J/token",
}  # fmt: skip


def ablation_report(document: Document) -> Report:
    """The blocks of a document `twin.ablation/1`."""
    objective = document["objective"]
    others = [name for name in TITLES if name != objective and any(name in row["changes"] for row in document["rows"])]
    columns = [
        Column("feature", left=True), Column("value", left=True), Column("context", 1, left=True), Column("verdict"),
        Column(TITLES[objective], help="Change with the feature, and its 95 % interval."),
        *(Column(TITLES[name], 3) for name in others),
    ]  # fmt: skip
    table = Table(columns, title=f"{document['name']}: does it pay?", fits=True, sorts=True)
    for row in document["rows"]:
        changes = [_percent(row["changes"].get(name)) for name in others]
        table.add_row(
            row["feature"], row["value"], row["context"], row["verdict"],
            _percent(row["changes"].get(objective), ends=True), *changes,
        )  # fmt: skip
    blocks: list[Block] = [table]
    blocks += [Text(f"{row['feature']}, {row['value']}: {row['reason']}", "note") for row in _refused(document)]
    if document["skipped"]:
        skipped = "; ".join(f"{name} ({reason})" for name, reason in document["skipped"].items())
        blocks.append(Text(f"Left out: {skipped}.", "note"))
    blocks.append(Text(document["note"], "note"))
    if charts := [_chart(document, context) for context in ("alone", "others on") if _decided(document, context)]:
        blocks.append(Figure("ablation", charts, size=(7.6, 3.0 * len(charts)), on_page=False))
    return Report(f"{document['name']}: which features pay", blocks)


def _refused(document: Document) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row.get("reason") and row["context"] == "alone"]


def _decided(document: Document, context: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["context"] == context and document["objective"] in row["changes"]]


def _chart(document: Document, context: str) -> Chart:
    rows = _decided(document, context)
    changes = [row["changes"][document["objective"]] for row in rows]
    names = [f"{row['feature']}\n{row['value']}" for row in rows]
    percent = {end: [100 * change[end] for change in changes] for end in ("change", "low", "high")}
    curve = Curve("", names, percent["change"], kind="points", low=percent["low"], high=percent["high"])
    return Chart(context, [curve], "", f"{TITLES[document['objective']]}, %", from_zero=False)


def _percent(change: dict[str, float] | None, *, ends: bool = False) -> str | Shown:
    if change is None:
        return "–"
    text = f"{100 * change['change']:+.1f} %"
    if ends:
        text += f" ({100 * change['low']:+.1f} to {100 * change['high']:+.1f})"
    return Shown(text, 100 * change["change"], "%")
