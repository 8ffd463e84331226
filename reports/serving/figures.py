"""Figures of serving runs, drawn from a document alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from reports.settings import in_words, varying
from reports.svg import svg_text

Document = dict[str, Any]
Draw = Callable[[Document], Figure]

PREDICTED, MEASURED, WAITING = "#1f5fa8", "#d1762b", "#2a8c5a"
OUTAGE = "#c0392b"
COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8a5fbf", "#d1495b", "#4a4a4a")
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "itl": "ITL"}


def simulation_figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text; none for a run without detail."""
    return {name: svg_text(draw(document)) for name, draw in simulation_drawings(document).items()}


def simulation_drawings(document: Document) -> dict[str, Draw]:
    """The functions that draw the figures of a run, by name; none for a run without detail."""
    return {"latencies": _latencies, "over-time": _over_time} if document.get("series") else {}


def sweep_figures(document: Document) -> dict[str, str]:
    """Every figure of a sweep by name, each a complete SVG text; none for fewer than two configurations."""
    return {name: svg_text(draw(document)) for name, draw in sweep_drawings(document).items()}


def sweep_drawings(document: Document) -> dict[str, Draw]:
    """The functions that draw the figures of a sweep, by name; none for fewer than two configurations."""
    points = document["points"]
    keys = varying([point["settings"] for point in points])
    return {"sweep": functools.partial(_sweep, keys=keys)} if keys and len(points) > 1 else {}


def _latencies(document: Document) -> Figure:
    figure, grid = _canvas(7.6, 5.2, 2, 2)
    curves, measured = document["series"]["quantiles"], document.get("measured")
    for axes, (name, label) in zip(grid, LABELS.items(), strict=True):
        _cdf(axes, curves, name, PREDICTED, "predicted")
        if measured:
            _cdf(axes, measured["quantiles"], name, MEASURED, "measured")
        longest = max([*(curves.get(name) or [0.0])])
        scale, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
        axes.xaxis.set_major_formatter(FuncFormatter(functools.partial(_scaled, scale)))
        axes.set_xlabel(f"{label}, {unit}")
        axes.set_ylim(0, 1)
    grid[0].set_ylabel("share of requests")
    grid[2].set_ylabel("share")
    if grid[0].lines:
        grid[0].legend(fontsize=8, frameon=False, loc="lower right")
    grid[0].set_title(f"{document['name']}: latencies", loc="left", fontsize=10)
    return figure


def _scaled(scale: float, value: float, position: int | None) -> str:
    return f"{value * scale:g}"


def _cdf(axes: Axes, curves: Document, name: str, colour: str, label: str) -> None:
    if curves.get(name):
        axes.plot(curves[name], curves["p"], color=colour, lw=1.5, label=label)


def _over_time(document: Document) -> Figure:
    figure, (requests, memory) = _canvas(7.6, 4.6, 2, 1)
    series, measured = document["series"], document.get("measured") or {}
    for name, colour in (("running", PREDICTED), ("waiting", WAITING)):
        requests.plot(series["time"], series[name], color=colour, lw=1.4, label=f"{name}, predicted")
        if measured.get(name):
            requests.plot(measured["time"], measured[name], "o", ms=2.5, mfc="none", color=colour,
                          label=f"{name}, measured")  # fmt: skip
    for axes in (requests, memory):
        _shade_outages(axes, document.get("outages") or [], series["time"][-1])
    requests.set_ylabel("requests")
    requests.set_ylim(bottom=0)
    requests.set_title(f"{document['name']}: who ran and who waited", loc="left", fontsize=10)
    requests.legend(fontsize=8, frameon=False, ncols=2)
    memory.plot(series["time"], [100 * share for share in series["kv_used"]], color=PREDICTED, lw=1.4)
    memory.set_ylabel("KV blocks in use, %")
    memory.set_ylim(0, 100)
    memory.set_xlabel("time, s")
    return figure


def _shade_outages(axes: Axes, outages: list[Document], end: float) -> None:
    """Shade the time in which an engine was down, as far as it lies within the run."""
    shown = [each for each in outages if each["start"] < end]
    for i, outage in enumerate(shown):
        axes.axvspan(outage["start"], min(outage["end"], end), color=OUTAGE, alpha=0.15, lw=0,
                     label="_" if i else "outage")  # fmt: skip


def _sweep(document: Document, keys: list[str]) -> Figure:
    """Throughput, interactivity, TTFT and P99 ITL against the first swept field; other fields make lines."""
    figure, grid = _canvas(7.6, 5.2, 2, 2)
    drawn: list[tuple[str, Callable[[Document], float | None], str | None]] = [
        ("output tokens/s", lambda summary: summary["output_throughput"], "output_throughput"),
        ("interactivity, tokens/s", lambda summary: _inverse(summary["tpot"]), None),
        ("mean TTFT, ms", lambda summary: _ms(summary["ttft"], "mean"), "ttft.mean"),
        ("P99 ITL, ms", lambda summary: _ms(summary["itl"], "p99"), "itl.p99"),
    ]
    for axes, (label, value, interval) in zip(grid, drawn, strict=True):
        _lines(axes, document, keys, value, interval)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(keys[0])
    if len(keys) > 1:
        grid[0].legend(fontsize=7.5, frameon=False)
    grid[0].set_title(document["name"], loc="left", fontsize=10)
    return figure


def _lines(
    axes: Axes, document: Document, keys: list[str], value: Callable[[Document], float | None], interval: str | None
) -> None:
    lines: dict[str, list[Document]] = {}
    for point in document["points"]:
        lines.setdefault(in_words(point["settings"], keys[1:]), []).append(point)
    for colour, (label, points) in zip(COLOURS * len(lines), lines.items(), strict=False):
        settings = [point["settings"][keys[0]] for point in points]
        numeric = all(isinstance(each, int | float) and not isinstance(each, bool) for each in settings)
        places = settings if numeric else [str(each) for each in settings]
        heights = [value(point["summary"]) for point in points]
        axes.plot(places, [float("nan") if each is None else each for each in heights], "o-", ms=3.5, lw=1.3,
                  color=colour, label=label)  # fmt: skip
        _bars(axes, points, places, interval, colour)


def _bars(axes: Axes, points: list[Document], places: list[Any], name: str | None, colour: str) -> None:
    """Confidence intervals, where there are any."""
    scale = 1e3 if name and "." in name else 1.0
    for place, point in zip(places, points, strict=True):
        interval = point["intervals"].get(name) if name else None
        if interval:
            axes.plot([place, place], [scale * end for end in interval["confidence"]], color=colour, lw=3, alpha=0.35)


def _inverse(latency: Document | None) -> float | None:
    return 1 / latency["mean"] if latency and latency["mean"] else None


def _ms(latency: Document | None, point: str) -> float | None:
    return 1e3 * latency[point] if latency else None


def _canvas(width: float, height: float, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [each for row in grid for each in row]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, linewidth=0.6)
    return figure, axes
