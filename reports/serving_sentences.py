"""Serving runs in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from reports.blocks import Document, Shown

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
POINTS = ("mean", "p50", "p90", "p95", "p99")
MEANS = {"ttft.mean": "TTFT", "tpot.mean": "TPOT", "e2e.mean": "E2E", "output_throughput": "output"}
"""Metrics whose errors are taken apart."""


def caches(summary: Document) -> list[str]:
    """The share that prefix caches supplied beside its bounds, and copies of lower tiers; a line each."""
    lines, cache = [], summary.get("prefix_cache")
    if cache and cache["hit_rate"] is not None:
        text = f"prefix caches supplied {cache['hit_rate']:.1%} of prompt tokens"
        for name, size in (("device", "on the devices"), ("all", "in all tiers")):
            if name in cache:
                bounds = cache[name]
                text += f"; one cache {size}, LRU {bounds['lru']:.1%}, at best {bounds['belady']:.1%}"
        lines.append(f"{text}; an infinite one {cache['infinite']:.1%}")
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
    scaling = summary.get("autoscaling")
    if scaling:
        hours, cost = scaling["gpu_hours"], scaling["cost"]
        text = f"{scaling['engine_hours']:,.4g} engine-hours" if hours is None else f"{hours:,.4g} GPU-hours"
        text += "" if cost is None else f" for {cost:,.2f}"
        text += "".join(
            f"; {name}: {pool['mean_engines']:.3g} engines on average, {pool['most_engines']:.0f} at most"
            for name, pool in scaling["pools"].items()
        )
        text += f"; {scaling['started']:.0f} started, {scaling['stopped']:.0f} stopped"
        if scaling["missed_minutes"] is not None:
            text += f"; {scaling['missed_minutes']:.1%} of minutes missed"
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
    index = summary.get("fairness")
    if not index:
        return []
    if index["jain_index"] is None:
        return ["tenants did not compete: no two had requests waiting for long"]
    return [
        f"Jain's index of service by tenant {index['jain_index']:.3f}, over the {index['contested']:.1%} of the time "
        f"in which several had requests waiting"
    ]


def devices(document: Document) -> str:
    """The number of devices of each type, and their price."""
    fleet = document["devices"]
    at_most = "at most " if document["summary"].get("autoscaling") else ""
    text = at_most + ", ".join(f"{count:,} × {kind}" for kind, count in fleet["by_type"].items())
    if fleet["cost_per_hour"] is not None:
        text += f": {at_most}{fleet['cost_per_hour']:,.2f} an hour"
        cost = document["summary"].get("cost_per_million_output_tokens")
        text += f", {cost:,.3g} per million output tokens" if cost is not None else ""
    energy = document["summary"].get("energy")
    if energy is not None:
        text += f"; {energy['mean_kw']:.3g} kW, {energy['kwh']:.3g} kWh"
        joules = energy["joules_per_output_token"]
        text += f", {joules:.3g} J per output token" if joules is not None else ""
        text += f" (estimated, median error {energy['error']:.0%})"
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
            deviations = (f"{part} {_deviation(parts[part], document)}" for part in ("sampling", "model"))
            lines.append(f"{label} of one run, standard deviation: {', '.join(deviations)}")
    return lines


def _deviation(value: float | None, document: Document) -> str:
    """A relative deviation; where it was not varied, whether it is 0 or not known."""
    if value is not None:
        return f"{100 * value:.2g} %"
    if document["draws"] and not set(document.get("random", ())) - {"step_time"}:
        return "none (arrivals and lengths are fixed)"
    return "unknown"


def shares(summary: Document) -> str:
    """Shares of busy time, of full batches and of full caches."""
    names = {"busy": "busy", "load": "load", "kv_used": "KV blocks in use"}
    return ", ".join(
        f"{label} {100 * summary[name]:.3g} %" for name, label in names.items() if summary[name] is not None
    )


def sessions(times: Document) -> str:
    """The number of sessions, their time, and the prompt tokens that they sent again."""
    text = f"{times['count']:g} sessions"
    if not times["count"] or not times["time"]:
        return text
    time, waits = times["time"], times["waited"]
    text += f" of {times['turns']:.3g} turns: {time['mean']:.3g} s to the last answer on average"
    text += f" (p99 {time['p99']:.3g} s), of which {waits['mean']:.3g} s waiting for answers"
    if times["resent_cached"] is None:
        return text
    return (
        f"{text}; {100 * times['resent_share']:.3g} % of their prompt tokens were sent before, "
        f"and the cache had {100 * times['resent_cached']:.3g} % of these"
    )


def footnote(document: Document) -> str:
    """A note on the simulation: its step times, the number of runs, and what of the step times is a guess."""
    text = f"{document['note']} Step times: {step_times(document)}"
    runs = document["replications"] + document["draws"]
    notes = "".join(f" {note[:1].upper()}{note[1:]}." for note in document["step_time"].get("notes", ()))
    runs_text = f"{runs} runs; {_contents(document)}" if runs > 1 else f"One run; {no_interval(document)}"
    return f"{text}. {runs_text}.{notes}"


def _contents(document: Document) -> str:
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
    source = document["step_time"]
    kind = str(source["source"]).replace("_", " ")
    text = f"{kind} ({source['path']})" if "path" in source else kind
    return text + _measured_on(source.get("measured_on") or {})


def no_interval(document: Document) -> str:
    """A note that one run has no interval, with the flag that gives one."""
    random = set(document["random"])
    if random - {"step_time"}:
        return "--replications gives intervals"
    if random:
        return "no interval: everything in this run is fixed but its step times; --draws gives intervals"
    return "no interval: everything in this run is fixed, and the error of these step times is unknown"


def _measured_on(origin: Document) -> str:
    """The GPU, engine, model and split of the measured step times, as far as their file states them."""
    engine = " ".join(origin[name] for name in ("engine", "engine_version") if name in origin)
    ranks = f"tensor parallel {origin['tensor_parallel']}" if "tensor_parallel" in origin else ""
    parts = [text for text in (origin.get("gpu"), engine, origin.get("model"), ranks) if text]
    return f", measured on {', '.join(parts)}" if parts else ""


def warnings(document: Document) -> list[str]:
    outside, replayed = document.get("outside") or {}, document.get("replayed")
    part = [part_of_trace(replayed)] if replayed and replayed["requests"] < replayed["rows"] else []
    return (
        _overloaded(document)
        + part
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
    overload = document["overload"]
    engines = overload["engines"]
    names = engines[0] if len(engines) == 1 else f"{engines[0]} to {engines[-1]}"
    arrivals, starts = (f"{overload[rate]:.3g}" for rate in ("arrival_rate", "service_rate"))
    return [
        f"overloaded: {arrivals} requests/s arrive at {names} and {starts} are started, so latencies grow with the "
        f"length of the run ({overload['waiting']} requests wait at the last arrival)"
    ]


def change(value: float | None, reference: float | None) -> str:
    """The relative change in per cent; nothing for the reference itself."""
    if value is None or not reference or value == reference:
        return ""
    return f"{100 * (value / reference - 1):+.1f} %"


def seconds(value: float | None) -> Shown:
    return Shown(milliseconds(value), value, "s")


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds below 10 s."""
    return "–" if value is None else f"{value * 1e3:.4g} ms" if abs(value) < 10 else f"{value:.4g} s"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"
