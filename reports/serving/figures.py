"""Figures of serving runs, drawn from a document alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from reports.serving.scaling import STATES, requests_per_second, shown_latency
from reports.settings import axis_and_lines, in_words, is_number
from reports.svg import svg_text

Document = dict[str, Any]
Draw = Callable[[Document], Figure]

PREDICTED, MEASURED, WAITING = "#1f5fa8", "#d1762b", "#2a8c5a"
OUTAGE = "#c0392b"
COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8a5fbf", "#d1495b", "#4a4a4a")
SPAN_OF_LOG = 30.0
"""Latencies that span more than this factor are drawn on a logarithmic axis."""

LABELS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "itl": "ITL"}


def simulation_figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text; none for a run without detail."""
    return {name: svg_text(draw(document)) for name, draw in simulation_drawings(document).items()}


def simulation_drawings(document: Document) -> dict[str, Draw]:
    """The functions that draw the figures of a run, by name; none for a run without detail."""
    if not document.get("series"):
        return {}
    drawings: dict[str, Draw] = {"latencies": _latencies, "over-time": _over_time}
    if document.get("autoscaling"):
        drawings["autoscaling"] = _autoscaling
    return drawings


def sweep_figures(document: Document) -> dict[str, str]:
    """Every figure of a sweep by name, each a complete SVG text; none for fewer than two configurations."""
    return {name: svg_text(draw(document)) for name, draw in sweep_drawings(document).items()}


def sweep_drawings(document: Document) -> dict[str, Draw]:
    """The functions that draw the figures of a sweep, by name; none for fewer than two configurations."""
    found = axis_and_lines([point["settings"] for point in document["points"]])
    return {"sweep": functools.partial(_sweep, axis=found[0], others=found[1])} if found else {}


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
        figure.legend(*grid[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center",
                      ncols=2)  # fmt: skip
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


def _autoscaling(document: Document) -> Figure:
    """Requests, engines, and P99 of each minute, over time, with outages shaded."""
    found, figure, panels = document["autoscaling"], *_canvas(7.6, 6.4, 3, 1)
    load, engines, latency = panels
    minutes, end = found["minutes"], document["series"]["time"][-1]
    load.step(minutes["start"], requests_per_second(minutes), where="post", color=PREDICTED, lw=1.2)
    load.set_ylabel("requests/s")
    load.set_title(f"{document['name']}: load, engines and P99 by minute", loc="left", fontsize=10)
    series = document["series"]
    stack = [series["engines"][name] for name in STATES]
    engines.stackplot(series["time"], *stack, labels=list(STATES), colors=list(STATES.values()), step="post", lw=0)
    engines.set_ylabel("engines")
    engines.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")
    name = shown_latency(document)
    values = minutes[f"{name}_p99"]
    latency.step(minutes["start"], [float("nan") if each is None else each for each in values], where="post",
                 color=PREDICTED, lw=1.2)  # fmt: skip
    goal = document["scenario"]["measure"]["slo"].get(name)
    if goal is not None:
        latency.axhline(goal, color=MEASURED, lw=1, ls="--")
        latency.set_yscale("log")
    latency.set_ylabel(f"P99 {name.upper()}, s")
    latency.set_xlabel("time, s")
    for axes in panels:
        _shade_outages(axes, document.get("outages") or [], end)
        axes.set_xlim(0, end)
    for axes in (load, engines):
        axes.set_ylim(bottom=0)
    return figure


def _shade_outages(axes: Axes, outages: list[Document], end: float) -> None:
    """Shade the time in which an engine was down, as far as it lies within the run."""
    shown = [each for each in outages if each["start"] < end]
    for i, outage in enumerate(shown):
        axes.axvspan(outage["start"], min(outage["end"], end), color=OUTAGE, alpha=0.15, lw=0,
                     label="_" if i else "outage")  # fmt: skip


def _sweep(document: Document, axis: str, others: list[str]) -> Figure:
    """Throughput, interactivity, TTFT and P99 ITL over one swept field; other fields make lines."""
    figure, grid = _canvas(7.6, 5.2, 2, 2)
    drawn: list[tuple[str, Callable[[Document], float | None], str | None]] = [
        ("output tokens/s", lambda summary: summary["output_throughput"], "output_throughput"),
        ("interactivity, tokens/s", lambda summary: _inverse(summary["tpot"]), None),
        ("mean TTFT, ms", lambda summary: _ms(summary["ttft"], "mean"), "ttft.mean"),
        ("P99 ITL, ms", lambda summary: _ms(summary["itl"], "p99"), "itl.p99"),
    ]
    for axes, (label, value, interval) in zip(grid, drawn, strict=True):
        _lines(axes, document, axis, others, value, interval)
        axes.set_ylabel(label)
        axes.set_xlabel(axis)
        found = [height for height in (value(point["summary"]) for point in document["points"]) if height]
        if label.endswith("ms") and found and max(found) > SPAN_OF_LOG * min(found):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(functools.partial(_scaled, 1.0)))
        else:
            axes.set_ylim(bottom=0)
    if others:
        _legend_below(figure, grid[0], others)
    grid[0].set_title(document["name"], loc="left", fontsize=10)
    return figure


def _legend_below(figure: Figure, axes: Axes, others: list[str]) -> None:
    """Name the lines where they hide nothing; of many, the first and the last of their scale of colours."""
    handles, labels = axes.get_legend_handles_labels()
    title = None
    if len(labels) > len(COLOURS):
        title = f"{len(labels)} lines, from dark to bright, by {', '.join(others)}"
        handles, labels = [handles[0], handles[-1]], [labels[0], labels[-1]]
    columns = max(1, min(3, 90 // (max(map(len, labels)) + 6)))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=7.5, frameon=False, title=title,
        title_fontsize=7.5,
    )  # fmt: skip


def _lines(
    axes: Axes, document: Document, axis: str, others: list[str], value: Callable[[Document], float | None],
    interval: str | None,
) -> None:  # fmt: skip
    lines: dict[str, list[Document]] = {}
    for point in document["points"]:
        lines.setdefault(in_words(point["settings"], others), []).append(point)
    numeric = is_number(point["settings"][axis] for point in document["points"])
    for colour, (label, points) in zip(_colours(len(lines)), lines.items(), strict=True):
        if numeric:
            points.sort(key=lambda point: float(point["settings"][axis]))
        settings = [point["settings"][axis] for point in points]
        places = settings if numeric else [str(each) for each in settings]
        heights = [value(point["summary"]) for point in points]
        axes.plot(places, [float("nan") if each is None else each for each in heights], "o-", ms=3.5, lw=1.3,
                  color=colour, label=label)  # fmt: skip
        _bars(axes, points, places, interval, colour)


def _colours(count: int) -> list[Any]:
    """A colour for each line, no two alike: along one scale where there are many."""
    from matplotlib import colormaps

    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [colormaps["viridis"](0.9 * index / (count - 1)) for index in range(count)]


def _bars(axes: Axes, points: list[Document], places: list[Any], name: str | None, colour: Any) -> None:
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
