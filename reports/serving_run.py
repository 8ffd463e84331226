"""The report of a serving run, and its trace events for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reports import serving_sentences as sentences
from reports.blocks import (
    Block,
    Cell,
    Column,
    Curve,
    Document,
    Figure,
    Report,
    Row,
    Shown,
    Table,
    Text,
    distribution,
    texts,
    timeline,
)
from reports.fields import LATENCIES as MEANINGS
from reports.fields import METRICS
from reports.fields import POINTS as POINT_MEANINGS
from reports.run_directory import replacing
from reports.serving_sentences import LATENCIES, MEANS, POINTS, number, seconds
from reports.theme import GOAL, MEASURED, PREDICTED, SERIES, SOFT, WAITING

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
CLIENTS = {"service_classes": "service class", "tenants": "tenant", "pools": "pool"}
COUNTS = ("prefill_tokens", "cached_tokens", "preemptions", "steps")
STATES = {"up": PREDICTED, "starting": MEASURED, "draining": SOFT, "failed": GOAL}
"""States of engines and their colours."""


def run_report(document: Document) -> Report:
    """Latencies, with their intervals or with a measured run; then the work of the engines."""
    summary = document["summary"]
    blocks: list[Block] = [
        Text(sentences.headline(document), "answer"), Text("Latencies", "heading", detail=True),
        *_distributions(document), _latencies(document),
        *(_clients(summary[name], title) for name, title in CLIENTS.items() if summary.get(name)),
        *texts(sentences.fairness(summary)), *_comparison(document), *_classes(document), *_over_time(document),
        Text(", ".join(f"{name.replace('_', ' ')} {summary[name]:g}" for name in COUNTS)),
        Text(sentences.shares(summary)), *texts(sentences.caches(summary)), *texts(sentences.scaling_lines(summary)),
        *_autoscaling(document), *_shed(summary), *_sessions(summary),
    ]  # fmt: skip
    if document.get("devices"):
        blocks.append(Text(sentences.devices(document)))
    blocks += [*texts(sentences.error_parts(document)), *_assumptions(document)]
    entries = {"Engines": document["engines"], "Links": document["links"], "Outages, seconds": document.get("outages")}
    blocks += [_entries(title, rows) for title, rows in entries.items() if rows]
    blocks += [Text(sentences.footnote(document), "note"), *texts(sentences.warnings(document), "warning")]
    return Report(document["name"], blocks)


def _goals(document: Document) -> dict[str, float]:
    return dict(document.get("scenario", {}).get("measure", {}).get("slo") or {})


def _latencies(document: Document) -> Table:
    columns = [Column("", left=True), *(Column(point, help=POINT_MEANINGS[point][1]) for point in POINTS)]
    table = Table(columns, edge=True)
    for name, label in LATENCIES.items():
        values = document["summary"][name]
        if values is None:
            continue
        table.add_row(label, *(seconds(values[point]) for point in POINTS))
        intervals = [document["intervals"].get(f"{name}.{point}") for point in POINTS]
        if any(intervals):
            table.add_row("  expectation", *(_range(interval, "confidence") for interval in intervals))
            table.add_row("  another run", *(_range(interval, "prediction") for interval in intervals))
    return table


def _range(interval: Document | None, kind: str) -> Cell:
    if interval is None:
        return Shown("", None)
    low, high = interval[kind]
    return Shown(f"{sentences.milliseconds(low)} to {sentences.milliseconds(high)}", [low, high], "s")


def _clients(clients: Document, title: str) -> Table:
    """Mean and 99th percentile of latencies by service class or tenant, and the shares that met their goals."""
    latencies = [latency for latency in LATENCIES if latency != "itl"]
    titles = ("requests", *(f"{LATENCIES[latency]} {point}" for latency in latencies for point in ("mean", "p99")))
    goals, sheds = (any(key in row for row in clients.values()) for key in ("goals_met", "shed_share"))
    columns = [*titles, *(["goals met"] if goals else []), *(["shed"] if sheds else [])]
    table = Table([Column("", left=True), *map(Column, columns)], title=f"by {title}", edge=True)
    for name, row in clients.items():
        values = [seconds(row[latency][point]) for latency in latencies for point in ("mean", "p99")]
        share = row.get("goals_met")
        shares = ["–" if share is None else f"{share:.1%}"] if goals else []
        shares += [f"{row['shed_share']:.1%}"] if sheds else []
        table.add_row(name, f"{row['requests']:g}", *values, *shares)
    return table


def _comparison(document: Document) -> list[Block]:
    if not document.get("comparison"):
        return []
    titles = ("measured", "predicted", "error")
    title = f"beside {document['measured']['source']}"
    table = Table([Column("", left=True), *map(Column, titles)], title=title, edge=True)
    for name, row in document["comparison"].items():
        values = [
            Shown(number(row[side]), row[side]) if "throughput" in name else seconds(row[side]) for side in titles[:2]
        ]
        table.add_row(name, *values, f"{100 * row['error']:+.2f} %")
    return [table]


def _assumptions(document: Document) -> list[Block]:
    if not document.get("assumptions"):
        return []
    columns = [Column("", left=True), *map(Column, MEANS.values()), Column("known by", left=True),
               Column("measure next", left=True)]  # fmt: skip
    table = Table(columns, title="what costs most: deviation by each alone", edge=True)
    for row in document["assumptions"]:
        deviations = (f"{100 * row['deviation'].get(name, 0.0):.2g} %" for name in MEANS)
        table.add_row(row["about"], *deviations, row["basis"], row["measure"])
    return [table]


def _shed(summary: Document) -> list[Block]:
    shed = summary.get("shed")
    if not shed:
        return []
    return [Text(f"{shed['requests']:g} requests shed ({shed['share']:.1%}); {shed['retries']:g} were sent again")]


def _entries(title: str, entries: Sequence[Document]) -> Table:
    columns = [Column(key, help=METRICS[key].help if key in METRICS else "") for key in entries[0]]
    rows: list[Row] = [[Shown("", value) for value in entry.values()] for entry in entries]
    return Table(columns, rows, title=title, detail=True)


def _distributions(document: Document) -> list[Block]:
    """A chart of each latency: whole curves of a run with detail, else percentiles, which make no figure."""
    measured, series = (document.get("measured") or {}).get("quantiles", {}), document.get("series")
    charts = []
    for name, label in LATENCIES.items():
        curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        if series and series["quantiles"].get(name):
            curves["predicted"] = (series["quantiles"][name], series["quantiles"]["p"])
        elif not series and document["summary"][name]:
            curves["predicted"] = _percentiles(document["summary"][name])
        if measured.get(name):
            curves["measured"] = (measured[name], measured["p"])
        if curves or series:
            colours = [{"predicted": PREDICTED, "measured": MEASURED}[side] for side in curves]
            title = f"{label}: {MEANINGS[name][1].partition(':')[0]}"
            charts.append(distribution(title, curves, label, _goals(document).get(name), colours))
    figure = "latencies" if series else ""
    return [Figure(figure, charts, f"{document['name']}: latencies", columns=2)] if charts else []


def _percentiles(values: Mapping[str, float]) -> tuple[list[float], list[float]]:
    return [values[point] for point in SHARES], list(SHARES.values())


def _classes(document: Document) -> list[Block]:
    classes = (document.get("series") or {}).get("classes")
    if not classes:
        return []
    shares, goals = document["series"]["quantiles"]["p"], _goals(document)
    charts = []
    for name, label in LATENCIES.items():
        samples = {key: (row["quantiles"][name], shares) for key, row in classes.items() if row["quantiles"].get(name)}
        if samples:
            charts.append(distribution(f"{label} by class of request", samples, label, goals.get(name)))
    rows: list[Row] = [
        [key, Shown("", row["requests"]), label, *(seconds(row[name][point]) for point in POINTS)]
        for name, label in LATENCIES.items()
        for key, row in classes.items()
        if row.get(name)
    ]
    table = Table([*map(Column, ("class", "requests", "latency", *POINTS))], rows, detail=True)
    return [Text("By class of request", "heading", detail=True), Figure("", charts), table]


def _over_time(document: Document) -> list[Block]:
    series, measured = document.get("series"), document.get("measured") or {}
    if not series:
        return []
    curves = []
    for name, colour in (("running", PREDICTED), ("waiting", WAITING)):
        curves.append(Curve(f"{name}, predicted", series["time"], series[name], colour))
        if measured.get(name):
            curves.append(Curve(f"{name}, measured", measured["time"], measured[name], colour, "points"))
    outages = document.get("outages") or []
    requests = timeline("Who ran and who waited", curves, "requests", outages)
    memory_curves = [Curve("KV blocks in use", series["time"], [100 * share for share in series["kv_used"]], PREDICTED)]
    memory = timeline("KV blocks in use", memory_curves, "KV blocks in use, %", outages)
    figure = Figure("over-time", [requests, memory], document["name"], size=(7.6, 4.6), shared=True)
    return [Text("Over time", "heading", detail=True), figure]


def _autoscaling(document: Document) -> list[Block]:
    scaling, series = document.get("autoscaling"), document.get("series")
    if not scaling or not series:
        return []
    minutes, outages = scaling["minutes"], document.get("outages") or []
    times, goals = minutes["start"], _goals(document)
    rates = Curve("requests/s", times, [count / 60 for count in minutes["requests"]], PREDICTED, "steps")
    engines = [
        Curve(name, series["time"], series["engines"][name], colour, "steps")
        for name, colour in STATES.items()
        if any(series["engines"][name]) or name == "up"
    ]
    name = next((latency for latency in ("ttft", "tpot", "e2e") if latency in goals), "ttft")
    tails = [Curve(f"P99 {name.upper()}", times, minutes[f"{name}_p99"], PREDICTED, "steps")]
    if name in goals and times:
        tails.append(Curve("goal", [times[0], series["time"][-1]], [goals[name], goals[name]], GOAL, "dashed"))
    charts = [
        timeline("Load by minute", [rates], "requests/s", outages),
        timeline("Engines", engines, "engines", outages),
        timeline(f"P99 {name.upper()} by minute", tails, f"P99 {name.upper()}, s", outages),
    ]
    figure = Figure("autoscaling", charts, document["name"], size=(7.6, 6.4), shared=True)
    return [Text("Autoscaling", "heading", detail=True), figure]


def _sessions(summary: Document) -> list[Block]:
    sessions = summary.get("sessions")
    if not sessions:
        return []
    sentence = Text(sentences.sessions(sessions))
    if not sessions["count"] or not sessions["time"]:
        return [sentence]
    times: dict[str, Any] = {"whole session": sessions["time"], "waiting for answers": sessions["waited"]}
    samples = {name: _percentiles(values) for name, values in times.items()}
    chart = distribution("Time of a session", samples, "time", colours=[SERIES[0], SOFT], of="sessions")
    rows: list[Row] = [[name, *(seconds(values[point]) for point in POINTS)] for name, values in times.items()]
    table = Table([Column("", left=True), *map(Column, POINTS)], rows, detail=True)
    return [Text("Sessions", "heading", detail=True), sentence, Figure("", [chart]), table]


KINDS = ("decode", "mixed", "one-shot")
COUNTERS = {"requests": ("running", "waiting"), "free blocks": ("free",)}


def write_trace_events(file: Path, logs: Sequence[Any], requests: Any) -> None:
    """Write the trace atomically, compressed."""
    with replacing(file) as draft, gzip.open(draft, "wt", encoding="utf-8") as out:
        for i, event in enumerate(trace_events(logs, requests)):
            out.write(("[\n" if i == 0 else ",\n") + json.dumps(event))
        out.write("\n]\n")


def trace_events(logs: Sequence[Any], requests: Any) -> Iterator[dict[str, Any]]:
    """A process for each engine, with its steps and counters, and one for requests. Times in microseconds.

    Steps passed over because nothing changed are one slice, "decode ×k". An outage is a slice between steps.

    `logs`, of engines: `ends` of steps; of those logged one by one (`index`) `starts`, `prefill_tokens` and `kinds` (of
    `KINDS`); `changes`, flat: (time, running, waiting, free blocks) from each boundary on at which one may change; and
    `outages`, (start, end). `requests`: columns `id`, `arrival`, `first_token` and `last_token`.
    """
    for pid, log in enumerate(logs, start=1):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": log.name}}
        yield from _steps(log, pid)
        for start, end in log.outages:
            yield _slice("outage", start, end, pid, {})
        yield from _counters(log, pid)
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "requests"}}
    for request, arrival, first, last in zip(
        requests.id, requests.arrival, requests.first_token, requests.last_token, strict=True
    ):
        for name, begin, end in (("to first token", arrival, first), ("decode", first, last)):
            common = {"cat": "request", "id": request, "pid": 0, "tid": 0, "name": name}
            yield {**common, "ph": "b", "ts": begin * 1e6}
            yield {**common, "ph": "e", "ts": end * 1e6}


def _steps(log: Any, pid: int) -> Iterator[dict[str, Any]]:
    begin, end = 0, 0.0
    for step, start, tokens, kind in zip(log.index, log.starts, log.prefill_tokens, log.kinds, strict=True):
        if step > begin:
            yield _slice(f"decode ×{step - begin}", end, log.ends[step - 1], pid, {})
        yield _slice(KINDS[kind], start, log.ends[step], pid, {"prompt tokens": tokens})
        begin, end = step + 1, log.ends[step]
    if len(log.ends) > begin:
        yield _slice(f"decode ×{len(log.ends) - begin}", end, log.ends[-1], pid, {})


def _slice(name: str, start: float, end: float, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "pid": pid, "tid": 1, "name": name, **times, "args": args}


def _counters(log: Any, pid: int) -> Iterator[dict[str, Any]]:
    changes, last = log.changes, {"requests": (-1.0, -1.0), "free blocks": (-1.0,)}
    for i in range(0, len(changes), 4):
        now, running, waiting, free = changes[i : i + 4]
        for name, values in (("requests", (running, waiting)), ("free blocks", (free,))):
            if values != last[name]:
                last[name] = values
                args = dict(zip(COUNTERS[name], values, strict=True))
                yield {"ph": "C", "pid": pid, "name": name, "ts": now * 1e6, "args": args}
