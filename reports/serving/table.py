"""Tables of serving runs, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
POINTS = ("mean", "p50", "p90", "p95", "p99")


def simulation_table(document: Document) -> RenderableType:
    """Latencies in milliseconds with their intervals or what was measured beside them; then what the engines did."""
    summary = document["summary"]
    parts: list[RenderableType] = [Text(headline(document), style="bold"), _latencies(document)]
    if document.get("comparison"):
        parts.append(_comparison(document))
    counts = ("prefill_tokens", "cached_tokens", "preemptions", "steps")
    parts.append(Text(", ".join(f"{name.replace('_', ' ')} {summary[name]:g}" for name in counts)))
    parts.append(Text(footnote(document), style="dim"))
    parts += [Text(text, style="bold red") for text in warnings(document)]
    return Group(*parts)


def sweep_table(document: Document) -> RenderableType:
    """One row a configuration, with the change of throughput and interactivity against the first row."""
    points = document["points"]
    keys = list(points[0]["settings"])
    table = Table(box=None, header_style="bold")
    headers = (*keys, "TTFT mean", "TTFT p99", "TPOT mean", "ITL p99", "1/TPOT", "", "output tok/s", "")
    for header in headers:
        table.add_column(header, justify="right")
    first = points[0]["summary"]
    for point in points:
        summary = point["summary"]
        table.add_row(
            *(str(point["settings"][key]) for key in keys),
            *(_ms(_at(summary, name)) for name in ("ttft.mean", "ttft.p99", "tpot.mean", "itl.p99")),
            _interactivity(summary),
            change(_inverse(_at(summary, "tpot.mean")), _inverse(_at(first, "tpot.mean"))),
            _number(summary["output_throughput"]),
            change(summary["output_throughput"], first["output_throughput"]),
        )
    found = [text for point in points for text in warnings(point)]
    notes = [Text(text, style="bold red") for text in dict.fromkeys(found)]
    return Group(table, Text(footnote(points[0]), style="dim"), *notes)


def headline(document: Document) -> str:
    """The answer in one sentence."""
    summary = document["summary"]
    text = f"{document['name']}: {summary['requests']} requests"
    if summary["output_throughput"]:
        text += f", {summary['output_throughput']:.0f} output tokens/s of the whole system"
    if summary["ttft"] and summary["tpot"]:
        text += f", TTFT {_ms(summary['ttft']['mean'])}, TPOT {_ms(summary['tpot']['mean'])} on average"
    if summary.get("goodput") is not None:
        text += f", goodput {summary['goodput']:.3g} requests/s"
    return text


def footnote(document: Document) -> str:
    """That it is simulated, from what, and how often."""
    source = document["step_time"]
    text = f"{document['note']} Step times: {source['source'].replace('_', ' ')}"
    text += f" ({source['path']})" if "path" in source else ""
    runs = document["replications"] * max(document["draws"], 1)
    return f"{text}. {runs} runs; 95 % intervals." if runs > 1 else f"{text}. One run; --replications gives intervals."


def warnings(document: Document) -> list[str]:
    """What a reader must know before he believes the numbers."""
    outside = document.get("outside") or {}
    return [
        f"extrapolated: {axis} up to {value:g} lies outside what the step times were measured for"
        for axis, value in outside.items()
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
        table.add_row(label, *(_ms(values[point]) for point in POINTS))
        intervals = [document["intervals"].get(f"{name}.{point}") for point in POINTS]
        if any(intervals):
            table.add_row("  expectation", *(_range(each, "confidence") for each in intervals), style="dim")
            table.add_row("  another run", *(_range(each, "prediction") for each in intervals), style="dim")
    return table


def _comparison(document: Document) -> Table:
    table = Table(box=None, header_style="bold", title=f"beside {document['measured']['source']}", title_justify="left")
    for header in ("", "measured", "predicted", "error"):
        table.add_column(header, justify="right" if header else "left")
    for name, row in document["comparison"].items():
        shown = _number if "throughput" in name else _ms
        error = f"{100 * row['error']:+.2f} %"
        table.add_row(name, shown(row["measured"]), shown(row["predicted"]), error)
    return table


def _range(interval: Document | None, kind: str) -> str:
    if interval is None:
        return ""
    low, high = interval[kind]
    return f"{_ms(low)} to {_ms(high)}"


def _at(summary: Document, name: str) -> float | None:
    group, point = name.split(".")
    return summary[group][point] if summary[group] else None


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def _interactivity(summary: Document) -> str:
    value = _inverse(_at(summary, "tpot.mean"))
    return "–" if value is None else f"{value:.1f} tok/s"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value * 1e3:.4g} ms" if abs(value) < 10 else f"{value:.4g} s"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"
