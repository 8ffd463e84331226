"""Pages of serving runs that one can explore: the answer, charts, the numbers, and their origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from reports.html_page import cell, help_table, table
from reports.pages.charts import Curve, distribution, timeline
from reports.pages.explorer import View, explorer
from reports.pages.fields import LATENCIES as MEANINGS
from reports.pages.fields import METRICS, Field, metric_fields, setting_fields
from reports.pages.fields import POINTS as POINT_MEANINGS
from reports.pages.frame import whole_page
from reports.pages.tables import sortable
from reports.pages.theme import MEASURED, PREDICTED, SOFT, WAITING
from reports.serving.scaling import scaling_parts
from reports.serving.sweep_table import note_lines, warning_lines
from reports.serving.table import (
    LATENCIES,
    MEANS,
    POINTS,
    at,
    caches,
    devices,
    error_parts,
    footnote,
    headline,
    scaling_lines,
    sessions,
    sweep_footnote,
    warnings,
)  # fmt: skip
from reports.settings import axis_and_lines, fixed, varying

if TYPE_CHECKING:
    from bokeh.models import UIElement

    from reports.pages.frame import Part

Document = dict[str, Any]

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def simulation_page(document: Document, manifest: Document) -> str:
    """The page of one scenario."""
    parts: list[Part] = [
        f"<h1>{escape(document['name'])}</h1>",
        f'<p class="answer">{escape(headline(document))}</p>',
        f'<p class="note">{escape(footnote(document))}</p>',
        *(f'<p class="warning">{escape(text)}</p>' for text in warnings(document)),
        *([f"<p>{escape(devices(document))}</p>"] if document.get("devices") else []),
        "<h2>Latencies</h2>",
        _distributions(document),
        _latencies(document),
        *(f"<p>{escape(text)}</p>" for text in error_parts(document)),
        *_classes(document),
        *_over_time(document),
        *(f"<p>{escape(text)}</p>" for text in scaling_lines(document["summary"])),
        *scaling_parts(document),
        *(f"<p>{escape(text)}</p>" for text in caches(document["summary"])),
        *_sessions(document["summary"]),
        _assumptions(document),
    ]
    if document.get("comparison"):
        rows = [
            [escape(name), cell(row["measured"]), cell(row["predicted"]), f"{100 * row['error']:+.2f} %"]
            for name, row in document["comparison"].items()
        ]
        title = f"<h2>Beside {escape(document['measured']['source'])}</h2>"
        parts += [title, table(["", "measured", "predicted", "error"], rows)]
    parts += ["<h2>Engines</h2>", _entries(document["engines"])]
    if document["links"]:
        parts += ["<h2>Links</h2>", _entries(document["links"])]
    if document.get("outages"):
        parts += ["<h2>Outages, seconds</h2>", _entries(document["outages"])]
    return whole_page(document["name"], parts, manifest)


def sweep_page(document: Document, manifest: Document) -> str:
    """The page of a sweep: its points to explore."""
    points, infeasible = document["points"], document.get("infeasible") or []
    settings = [each["settings"] for each in [*points, *infeasible]]
    shared = fixed(settings)
    keys = varying(settings)
    parts: list[Part] = [
        f"<h1>{escape(document['name'])}: sweep</h1>",
        *([f"<p>All with {escape(shared)}.</p>"] if shared else []),
        f'<p class="note">{escape(sweep_footnote(points))}</p>',
        *_warned(warning_lines(points, keys)),
        *(f'<p class="note">{escape(line)}</p>' for line in note_lines(points, keys)),
        _explorer(points),
        *_infeasible(infeasible),
    ]
    return whole_page(document["name"], parts, manifest)


def _infeasible(infeasible: Sequence[Document]) -> list[Part]:
    """Configurations that cannot run, with the reason."""
    if not infeasible:
        return []
    keys = list(infeasible[0]["settings"])
    rows = [[*(each["settings"].get(key) for key in keys), each["reason"]] for each in infeasible]
    return ["<h2>Infeasible</h2>", sortable([*(key.rpartition(".")[2] for key in keys), "reason"], rows)]


def serving_fields(points: Sequence[Document]) -> list[Field]:
    """Settings that vary, and all metrics, of documents of serving runs."""
    values = {key: [_metric(point, key) for point in points] for key in METRICS}
    limits = _goals(points[0])
    goals = {f"{name}.{point}": limits[name] for name in limits for point in POINTS}
    found = [*setting_fields([point["settings"] for point in points]), *metric_fields(values, goals)]
    if any(point.get("saturated") for point in points):
        texts = ["overloaded" if point.get("saturated") else "keeps up" for point in points]
        found.append(Field("#queue", "queue", texts, "Whether requests come faster than they are started"))
    return found


def _explorer(points: Sequence[Document]) -> Part:
    fields = serving_fields(points)
    known = {each.key for each in fields}
    metric = next((key for key in ("ttft.p99", "output_throughput") if key in known), None)
    if metric is None:
        return "<p>No request counts in any point.</p>"
    found = axis_and_lines([point["settings"] for point in points])
    x, others = found or (metric, [])
    colour = others[0] if others else ""
    views = [View("latency", x, metric, colour)]
    if "output_throughput" in known:
        views.append(View("throughput", x, "output_throughput", colour))
    rate = "output_throughput_per_device" if "output_throughput_per_device" in known else "output_throughput"
    if {"user", rate} <= known:
        views.append(View("throughput against interactivity", "user", rate, colour or x, pareto=True))
    return explorer(fields, views)


def _metric(point: Document, key: str) -> float | None:
    summary = point["summary"]
    match key:
        case "user":
            tpot = at(summary, "tpot.mean")
            return 1 / tpot if tpot else None
        case "devices":
            return (point.get("devices") or {}).get("total")
        case "cost_per_hour":
            return (point.get("devices") or {}).get("cost_per_hour")
    return at(summary, key)


def _goals(document: Document) -> dict[str, float]:
    """Limits of a request's latencies, by latency, seconds."""
    return dict(document.get("scenario", {}).get("measure", {}).get("slo") or {})


def _distributions(document: Document) -> list[UIElement]:
    """A chart of each latency: whole curves of a run with detail, else percentiles."""
    goals, measured = _goals(document), (document.get("measured") or {}).get("quantiles", {})
    series = document.get("series")
    charts: list[UIElement] = []
    for name, label in LATENCIES.items():
        curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        if series and series["quantiles"].get(name):
            curves["predicted"] = (series["quantiles"][name], series["quantiles"]["p"])
        elif not series and document["summary"][name]:
            curves["predicted"] = _percentiles(document["summary"][name])
        if measured.get(name):
            curves["measured"] = (measured[name], measured["p"])
        if curves:
            colours = [{"predicted": PREDICTED, "measured": MEASURED}[each] for each in curves]
            title = f"{label}: {MEANINGS[name][1].partition(':')[0]}"
            charts.append(distribution(title, curves, f"{label}, s", goals.get(name), colours))
    return charts


def _percentiles(values: Mapping[str, float]) -> tuple[list[float], list[float]]:
    return [values[point] for point in SHARES], list(SHARES.values())


def _classes(document: Document) -> list[Part]:
    """Percentiles and distributions of each class of requests, where there are several."""
    classes = (document.get("series") or {}).get("classes")
    if not classes:
        return []
    goals = _goals(document)
    charts: list[UIElement] = []
    for name, label in LATENCIES.items():
        found = {each: entry["quantiles"][name] for each, entry in classes.items() if entry["quantiles"].get(name)}
        curves = {each: (values, document["series"]["quantiles"]["p"]) for each, values in found.items()}
        if curves:
            charts.append(distribution(f"{label} by class of request", curves, f"{label}, s", goals.get(name)))
    rows = [
        [escape(each), cell(entry["requests"]), label, *(cell(entry[name][point]) for point in POINTS)]
        for name, label in LATENCIES.items()
        for each, entry in classes.items()
        if entry.get(name)
    ]
    return ["<h2>By class of request</h2>", charts, table(["class", "requests", "latency, s", *POINTS], rows)]


def _over_time(document: Document) -> list[Part]:
    """Requests and KV blocks over time, on one time axis, with outages shaded."""
    series, measured = document.get("series"), document.get("measured") or {}
    if not series:
        return []
    lines = []
    for name, colour in (("running", PREDICTED), ("waiting", WAITING)):
        lines.append(Curve(f"{name}, predicted", series["time"], series[name], colour))
        if measured.get(name):
            lines.append(Curve(f"{name}, measured", measured["time"], measured[name], colour, "points"))
    outages = document.get("outages") or []
    shaded = ", outages shaded" if outages else ""
    requests = timeline(f"Who ran and who waited{shaded}", lines, "requests", outages)
    used = [Curve("KV blocks in use", series["time"], [100 * share for share in series["kv_used"]], PREDICTED)]
    memory = timeline(f"KV blocks in use{shaded}", used, "KV blocks in use, %", outages, x_range=requests.x_range)
    return ["<h2>Over time</h2>", [requests, memory]]


def _sessions(summary: Document) -> list[Part]:
    """Times of sessions, and the prompt tokens that they sent again."""
    found = summary.get("sessions")
    if not found or not found["count"] or not found["time"]:
        return []
    curves = {"whole session": _percentiles(found["time"]), "waiting for answers": _percentiles(found["waited"])}
    rows = [["whole session", *(cell(found["time"][point]) for point in POINTS)],
            ["waiting for answers", *(cell(found["waited"][point]) for point in POINTS)]]  # fmt: skip
    return [
        "<h2>Sessions</h2>",
        f"<p>{escape(sessions(found))}</p>",
        [distribution("Time of a session", curves, "seconds", colours=[PREDICTED, SOFT], of="sessions")],
        table(["seconds", *POINTS], rows),
    ]


def _latencies(document: Document) -> str:
    rows = []
    for name, label in LATENCIES.items():
        values = document["summary"][name]
        if values is None:
            continue
        meaning = f'<span title="{escape(MEANINGS[name][1])}">{label}</span>'
        rows.append([meaning, *(cell(values[point]) for point in POINTS)])
        for kind, text in (("confidence", "95 % of the expectation"), ("prediction", "95 % of another run")):
            intervals = [document["intervals"].get(f"{name}.{point}") for point in POINTS]
            if any(intervals):
                rows.append([text, *(cell(each and each[kind]) for each in intervals)])
    return help_table({"seconds": ""} | {point: POINT_MEANINGS[point][1] for point in POINTS}, rows)


def _assumptions(document: Document) -> str:
    """Assumptions, the most costly first."""
    found = document.get("assumptions") or []
    headers = ["what costs most: deviation by each alone", *MEANS.values(), "known by", "measure next"]
    rows = [
        [each["about"], *(f"{100 * each['deviation'].get(name, 0.0):.2g} %" for name in MEANS), each["basis"],
         each["measure"]]
        for each in found
    ]  # fmt: skip
    return table(headers, rows) if rows else ""


def _entries(entries: list[Document]) -> str:
    helps = {key: METRICS[key].help if key in METRICS else "" for key in entries[0]}
    return help_table(helps, [[cell(value) for value in entry.values()] for entry in entries])


def _warned(texts: Sequence[str]) -> list[str]:
    """Warnings of a sweep's points: the first, and the others folded."""
    if not texts:
        return []
    items = "".join(f"<li>{escape(text)}</li>" for text in texts[1:])
    rest = f"<details><summary>{len(texts) - 1} more warnings</summary><ul>{items}</ul></details>" if items else ""
    return [f'<p class="warning">{escape(texts[0])}</p>{rest}']
