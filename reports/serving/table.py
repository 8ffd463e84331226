"""Tables of serving runs, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
POINTS = ("mean", "p50", "p90", "p95", "p99")
MEANS = {"ttft.mean": "TTFT", "tpot.mean": "TPOT", "e2e.mean": "E2E", "output_throughput": "output"}
"""Metrics whose errors are taken apart."""


def simulation_table(document: Document) -> RenderableType:
    """Latencies in milliseconds, with their intervals or with a measured run; then the work of the engines."""
    summary = document["summary"]
    parts: list[RenderableType] = [Text(headline(document), style="bold"), _latencies(document)]
    parts += [_clients(summary[name], name) for name in ("service_classes", "tenants", "pools") if summary.get(name)]
    parts += [Text(text) for text in fairness(summary)]
    if document.get("comparison"):
        parts.append(_comparison(document))
    counts = ("prefill_tokens", "cached_tokens", "preemptions", "steps")
    parts.append(Text(", ".join(f"{name.replace('_', ' ')} {summary[name]:g}" for name in counts)))
    parts.append(Text(_shares(summary)))
    parts += [Text(text) for text in caches(summary)]
    parts += [Text(text) for text in scaling_lines(summary)]
    if summary.get("shed"):
        found = summary["shed"]
        told = f"{found['requests']:g} requests shed ({found['share']:.1%}); {found['retries']:g} were sent again"
        parts.append(Text(told))
    if summary.get("sessions"):
        parts.append(Text(sessions(summary["sessions"])))
    if document.get("devices"):
        parts.append(Text(devices(document)))
    parts += [Text(text) for text in error_parts(document)]
    if document.get("assumptions"):
        parts.append(_assumptions(document))
    parts.append(Text(footnote(document), style="dim"))
    parts += [Text(text, style="bold red") for text in warnings(document)]
    return Group(*parts)


def caches(summary: Document) -> list[str]:
    """The share that prefix caches supplied beside its bounds, and copies of lower tiers; a line each."""
    lines, found = [], summary.get("prefix_cache")
    if found and found["hit_rate"] is not None:
        text = f"prefix caches supplied {found['hit_rate']:.1%} of prompt tokens"
        for name, size in (("device", "on the devices"), ("all", "in all tiers")):
            if name in found:
                bounds = found[name]
                text += f"; one cache {size}, LRU {bounds['lru']:.1%}, at best {bounds['belady']:.1%}"
        lines.append(f"{text}; an infinite one {found['infinite']:.1%}")
    for name, tier in summary.get("kv_tiers", {}).items():
        lines.append(
            f"{name}: {tier['loaded_share']:.1%} of prompt tokens loaded, {tier['loaded_bytes']:.3g} bytes; "
            f"{tier['stored_bytes']:.3g} bytes stored; links {tier['load_utilization']:.1%} and "
            f"{tier['store_utilization']:.1%} busy"
        )
    if summary.get("kv_load"):
        mean, p99 = (milliseconds(summary["kv_load"][point]) for point in ("mean", "p99"))
        lines.append(f"loads take {mean} on average, {p99} at p99")
    return lines


def scaling_lines(summary: Document) -> list[str]:
    """GPU-hours, what they cost, and the minutes in which goals were missed; and latencies around outages."""
    lines: list[str] = []
    found = summary.get("autoscaling")
    if found:
        hours, cost = found["gpu_hours"], found["cost"]
        text = f"{found['engine_hours']:,.4g} engine-hours" if hours is None else f"{hours:,.4g} GPU-hours"
        text += "" if cost is None else f" for {cost:,.2f}"
        text += "".join(
            f"; {name}: {pool['mean_engines']:.3g} engines on average, {pool['most_engines']:.0f} at most"
            for name, pool in found["pools"].items()
        )
        text += f"; {found['started']:.0f} started, {found['stopped']:.0f} stopped"
        if found["missed_minutes"] is not None:
            text += f"; {found['missed_minutes']:.1%} of minutes missed"
        lines.append(text)
    around = summary.get("outages")
    if around:
        lines.append("P99 TTFT " + ", ".join(f"{_around(part, around)}" for part in around))
    return lines


def _around(part: str, around: Document) -> str:
    requests, ttft, share = around[part]["requests"], around[part]["ttft"], around[part].get("goodput_share")
    name = {"during": "during outages", "after": "after them"}.get(part, part)
    text = f"{name} {milliseconds(ttft['p99']) if ttft else 'of no request'}"
    return text + (f" ({share:.1%} of {requests:g} requests within goals)" if share is not None else "")


def fairness(summary: Document) -> list[str]:
    """Jain's index of service by tenant, and how much of the time it is about; a line, or none."""
    found = summary.get("fairness")
    if not found:
        return []
    if found["jain_index"] is None:
        return ["tenants did not compete: no two had requests waiting for long"]
    return [
        f"Jain's index of service by tenant {found['jain_index']:.3f}, over the {found['contested']:.1%} of the time "
        f"in which several had requests waiting"
    ]


def devices(document: Document) -> str:
    """The number of devices of each type, and their price."""
    found = document["devices"]
    most = "at most " if document["summary"].get("autoscaling") else ""
    text = most + ", ".join(f"{count:,} × {kind}" for kind, count in found["by_type"].items())
    if found["cost_per_hour"] is not None:
        text += f": {most}{found['cost_per_hour']:,.2f} an hour"
        cost = document["summary"].get("cost_per_million_output_tokens")
        text += f", {cost:,.3g} per million output tokens" if cost is not None else ""
    return text


def headline(document: Document) -> str:
    """The answer in one sentence."""
    summary = document["summary"]
    text = f"{document['name']}: {summary['requests']} requests"
    if summary["output_throughput"]:
        text += f", {summary['output_throughput']:.0f} output tokens/s of the whole system"
    if summary["ttft"] and summary["tpot"]:
        ttft, tpot = (milliseconds(summary[name]["mean"]) for name in ("ttft", "tpot"))
        text += f", TTFT {ttft}, TPOT {tpot} on average"
    if summary.get("goodput") is not None:
        text += f", goodput {summary['goodput']:.3g} requests/s"
    return text


def error_parts(document: Document) -> list[str]:
    """The error of one run and its parts, one line for each mean that has an interval."""
    lines = []
    for name, label in MEANS.items():
        parts = (document["intervals"].get(name) or {}).get("parts")
        if parts is not None:
            told = (f"{part} {_deviation(parts[part], document)}" for part in ("sampling", "model"))
            lines.append(f"{label} of one run, standard deviation: {', '.join(told)}")
    return lines


def _deviation(value: float | None, document: Document) -> str:
    """A relative deviation; where it was not varied, whether it is 0 or not known."""
    if value is not None:
        return f"{100 * value:.2g} %"
    if document["draws"] and not set(document.get("random", ())) - {"step_time"}:
        return "none (arrivals and lengths are fixed)"
    return "unknown"


def _assumptions(document: Document) -> Table:
    """Assumptions, the most costly first, and what to measure next."""
    table = Table(box=None, header_style="bold", title="what costs most: deviation by each alone", title_justify="left")
    for header in ("", *MEANS.values(), "known by", "measure next"):
        table.add_column(header, justify="right" if header in MEANS.values() else "left")
    for each in document["assumptions"]:
        told = (f"{100 * each['deviation'].get(name, 0.0):.2g} %" for name in MEANS)
        table.add_row(each["about"], *told, each["basis"], each["measure"])
    return table


def _shares(summary: Document) -> str:
    """Shares of busy time, of full batches and of full caches."""
    names = {"busy": "busy", "load": "load", "kv_used": "KV blocks in use"}
    return ", ".join(
        f"{label} {100 * summary[name]:.3g} %" for name, label in names.items() if summary[name] is not None
    )


def sessions(found: Document) -> str:
    """The number of sessions, their time, and the prompt tokens that they sent again."""
    text = f"{found['count']:g} sessions"
    if not found["count"] or not found["time"]:
        return text
    time, waited = found["time"], found["waited"]
    text += f" of {found['turns']:.3g} turns: {time['mean']:.3g} s to the last answer on average"
    text += f" (p99 {time['p99']:.3g} s), of which {waited['mean']:.3g} s waiting for answers"
    if found["resent_cached"] is None:
        return text
    return (
        f"{text}; {100 * found['resent_share']:.3g} % of their prompt tokens were sent before, "
        f"and the cache had {100 * found['resent_cached']:.3g} % of these"
    )


def footnote(document: Document) -> str:
    """A note on the simulation: its step times, the number of runs, and what of the step times is a guess."""
    text = f"{document['note']} Step times: {step_times(document)}"
    runs = document["replications"] + document["draws"]
    notes = "".join(f" {each[:1].upper()}{each[1:]}." for each in document["step_time"].get("notes", ()))
    counted = f"{runs} runs; {_contents(document)}" if runs > 1 else f"One run; {no_interval(document)}"
    return f"{text}. {counted}.{notes}"


def _contents(document: Document) -> str:
    """The content of 95 % intervals, in words."""
    if document["draws"]:
        return "95 % intervals of sampling and model together"
    if document["replications"] > 1 and "step_time" not in document.get("random", ()):
        return "95 % intervals of sampling alone: the error of these step times is unknown"
    return "95 % intervals of sampling alone; --draws adds the model's error"


def sweep_footnote(points: Sequence[Document]) -> str:
    """A note on the simulation, for all configurations of a sweep."""
    sources = list(dict.fromkeys(step_times(point) for point in points))
    source = sources[0] if len(sources) == 1 else f"{len(sources)} sources, as the rows say"
    runs = [point["replications"] + point["draws"] for point in points]
    low, high = min(runs), max(runs)
    text = f"{points[0]['note']} Step times: {source}."
    if high == 1:
        return f"{text} One run each; {no_interval(points[0])}."
    contents = next(_contents(point) for point in points if point["replications"] + point["draws"] > 1)
    return f"{text} {high if low == high else f'{low} to {high}'} runs each; {contents}."


def step_times(document: Document) -> str:
    """The origin of the step times."""
    source = document["step_time"]
    kind = str(source["source"]).replace("_", " ")
    text = f"{kind} ({source['path']})" if "path" in source else kind
    return text + _measured_on(source.get("measured_on") or {})


def no_interval(document: Document) -> str:
    """A note that one run has no interval, with the flag that gives one."""
    random = set(document.get("random", ("unknown",)))  # documents of earlier versions do not say
    if random - {"step_time"}:
        return "--replications gives intervals"
    if random:
        return "no interval: everything in this run is fixed but its step times; --draws gives intervals"
    return "no interval: everything in this run is fixed, and the error of these step times is unknown"


def _measured_on(origin: Document) -> str:
    """The GPU, engine, model and split of the measured step times, as far as their file states them."""
    engine = " ".join(origin[name] for name in ("engine", "engine_version") if name in origin)
    ranks = f"tensor parallel {origin['tensor_parallel']}" if "tensor_parallel" in origin else ""
    known = [text for text in (origin.get("gpu"), engine, origin.get("model"), ranks) if text]
    return f", measured on {', '.join(known)}" if known else ""


def warnings(document: Document) -> list[str]:
    """Warnings that a reader must see beside the numbers."""
    outside, replayed = document.get("outside") or {}, document.get("replayed")
    cut = [part_of_trace(replayed)] if replayed and replayed["requests"] < replayed["rows"] else []
    return (
        _overloaded(document)
        + cut
        + [
            f"extrapolated: {axis} up to {value:g} lies outside what the step times were measured for"
            for axis, value in outside.items()
        ]
    )


def part_of_trace(replayed: Document) -> str:
    """The part of its trace that a replay has played."""
    rows = f"the first {replayed['requests']:,} of {replayed['rows']:,} rows"
    return f"replay: {rows} of the trace, {replayed['seconds']:,.6g} of {replayed['recorded_seconds']:,.6g} seconds"


def _overloaded(document: Document) -> list[str]:
    """A warning that a queue grows, so that latencies are no property of the system; figures of the first such run."""
    if not document.get("saturated"):
        return []
    found = document["overload"]
    engines = found["engines"]
    named = engines[0] if len(engines) == 1 else f"{engines[0]} to {engines[-1]}"
    return [
        f"overloaded: {found['arrival_rate']:.3g} requests/s arrive at {named} and {found['service_rate']:.3g} are "
        f"started, so latencies grow with the length of the run ({found['waiting']} requests wait at the last arrival)"
    ]


def change(value: float | None, reference: float | None) -> str:
    """The relative change in per cent; nothing for the reference itself."""
    if value is None or not reference or value == reference:
        return ""
    return f"{100 * (value / reference - 1):+.1f} %"


def _latencies(document: Document) -> Table:
    table = Table(box=None, header_style="bold")
    for header in ("", *POINTS):
        table.add_column(header, justify="left" if not header else "right")
    for name, label in LATENCIES.items():
        values = document["summary"][name]
        if values is None:
            continue
        table.add_row(label, *(milliseconds(values[point]) for point in POINTS))
        intervals = [document["intervals"].get(f"{name}.{point}") for point in POINTS]
        if any(intervals):
            table.add_row("  expectation", *(_range(each, "confidence") for each in intervals), style="dim")
            table.add_row("  another run", *(_range(each, "prediction") for each in intervals), style="dim")
    return table


def _clients(found: Document, name: str) -> Table:
    """Mean and 99th percentile of latencies by service class or tenant, and the shares that met their goals."""
    table = Table(box=None, header_style="bold", title=f"by {TITLES[name]}", title_justify="left")
    latencies = [latency for latency in LATENCIES if latency != "itl"]
    heads = ("", "requests", *(f"{LATENCIES[each]} {point}" for each in latencies for point in ("mean", "p99")))
    goals, sheds = (any(key in row for row in found.values()) for key in ("goals_met", "shed_share"))
    for header in (*heads, *(["goals met"] if goals else []), *(["shed"] if sheds else [])):
        table.add_column(header, justify="right" if header else "left")
    for each, row in found.items():
        values = [milliseconds(row[latency][point]) for latency in latencies for point in ("mean", "p99")]
        met = row.get("goals_met")
        shares = ["–" if met is None else f"{met:.1%}"] if goals else []
        shares += [f"{row['shed_share']:.1%}"] if sheds else []
        table.add_row(each, f"{row['requests']:g}", *values, *shares)
    return table


TITLES = {"service_classes": "service class", "tenants": "tenant", "pools": "pool"}


def _comparison(document: Document) -> Table:
    table = Table(box=None, header_style="bold", title=f"beside {document['measured']['source']}", title_justify="left")
    for header in ("", "measured", "predicted", "error"):
        table.add_column(header, justify="right" if header else "left")
    for name, row in document["comparison"].items():
        shown = number if "throughput" in name else milliseconds
        error = f"{100 * row['error']:+.2f} %"
        table.add_row(name, shown(row["measured"]), shown(row["predicted"]), error)
    return table


def _range(interval: Document | None, kind: str) -> str:
    if interval is None:
        return ""
    low, high = interval[kind]
    return f"{milliseconds(low)} to {milliseconds(high)}"


def at(summary: Document, name: str) -> float | None:
    """A metric by its dotted name; None where the summary has none."""
    found: Any = summary
    for part in name.split("."):
        found = found.get(part) if found else None
    return cast("float | None", found)


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds below 10 s."""
    return "–" if value is None else f"{value * 1e3:.4g} ms" if abs(value) < 10 else f"{value:.4g} s"


def number(value: float | None) -> str:
    """A number with at most five digits."""
    return "–" if value is None else f"{value:.5g}"
