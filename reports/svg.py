"""Blocks as SVG: figures by name, drawn with matplotlib."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.blocks import Block, Chart, Curve, Document, Figure, Numbers, Picture
from reports.theme import GOAL, OUTAGE, SERIES, series_colours

Draw = Callable[[list[Any], Document], None]
"""Draws a document on the given axes, one for each panel."""

STYLES = {"solid": "-", "dashed": "--", "dotted": ":", "steps": "-", "points": "o", "crosses": "x", "both": "o-"}


def svg_text(drawing: Drawing) -> str:
    """A figure as SVG text. Without dates and random ids, so that equal documents give equal files."""
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "twin", "svg.fonttype": "none"}):
        drawing.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def figures(blocks: Iterable[Block]) -> dict[str, str]:
    svgs = {}
    for block in blocks:
        if isinstance(block, Picture):
            svgs[block.name] = block.svg
        elif isinstance(block, Figure) and block.name:
            svgs[block.name] = svg_text(drawing(block))
    return svgs


def canvas(
    panels: int, columns: int, size: tuple[float, float], *, sharex: bool = False, **grid: Any
) -> tuple[Drawing, list[Axes]]:
    """An empty figure and its panels, row by row."""
    figure = Drawing(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    rows = -(-panels // columns)
    axes = [panel for row in figure.subplots(rows, columns, squeeze=False, sharex=sharex, **grid) for panel in row]
    for panel in axes[panels:]:
        panel.set_visible(False)
    for panel in axes[:panels]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    return figure, axes[:panels]


def render(draw: Draw, document: Document, panels: int = 1, size: tuple[float, float] | None = None) -> str:
    """Draw panels side by side, as an SVG text. `size`: width and height, inches; None: by the number of panels."""
    figure, axes = canvas(panels, panels, size or (4.2 * panels + 1, 3.8))
    draw(axes, document)
    return svg_text(figure)


def drawing(figure: Figure) -> Drawing:
    """A figure with its legend below, which names lines once where all charts have the same."""
    result, panels = canvas(len(figure.charts), figure.columns, figure.size)
    for panel, chart in zip(panels, figure.charts, strict=True):
        _draw(panel, chart)
    if figure.title:
        result.suptitle(figure.title, x=0.01, ha="left", fontsize=10)
    legends = [panel.get_legend_handles_labels() for panel in panels]
    if all(labels == legends[0][1] for _, labels in legends):
        _legend_below(result, *legends[0])
    else:
        for panel, (_, labels) in zip(panels, legends, strict=True):
            if len(labels) > 1:
                panel.legend(fontsize=7.5, frameon=False)
    return result


def _legend_below(figure: Drawing, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Name the lines where they hide nothing; of many, the first and the last of their scale of colours."""
    if len(labels) < 2:
        return
    title = None
    if len(labels) > len(SERIES):
        title = f"{len(labels)} lines, by colour from the first to the last"
        handles, labels = [handles[0], handles[-1]], [labels[0], labels[-1]]
    columns = max(1, min(3, 90 // (max(map(len, labels)) + 6)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=7.5, frameon=False, title=title,
                  title_fontsize=7.5)  # fmt: skip


def _draw(axes: Axes, chart: Chart) -> None:
    labels: set[str] = set()
    for curve, colour in zip(chart.curves, series_colours(len(chart.curves)), strict=True):
        _curve(axes, curve, curve.colour or colour, "_" if curve.label in labels else curve.label)
        labels.add(curve.label)
    if chart.annotated:
        for curve in chart.curves:
            for x, y, name in zip(curve.x, curve.y, curve.names, strict=False):
                axes.annotate(name, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=6.5)
    for label, place in chart.marks.items():
        axes.axvline(place, color=GOAL, ls=":", lw=1, label=label)
    for index, (start, end) in enumerate(chart.shaded):
        axes.axvspan(start, end, color=OUTAGE, alpha=0.15, lw=0, label="_" if index else "outage")
    _scales(axes, chart)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_title(chart.title, loc="left", fontsize=8)


def _scales(axes: Axes, chart: Chart) -> None:
    if chart.log_x:
        places = [x for curve in chart.curves for x in curve.x]
        axes.set_xscale("log", base=2 if max(places) < 64 * min(places) else 10)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    if chart.y_range is not None:
        axes.set_ylim(*chart.y_range)
    elif chart.from_zero and not chart.log_y:
        axes.set_ylim(bottom=0)


def _plain(value: float, _: int | None) -> str:
    return f"{value:g}"


def _curve(axes: Axes, curve: Curve, colour: Any, label: str) -> None:
    options = {"color": colour, "label": label, "lw": 1.4, "ms": 3.5}
    heights = _floats(curve.y)
    if curve.kind == "steps":
        axes.step(curve.x, heights, where="post", color=colour, label=label, lw=1.4)
    else:
        axes.plot(curve.x, heights, STYLES[curve.kind], **options)
    if curve.low:
        axes.vlines(curve.x, _floats(curve.low), _floats(curve.high), color=colour, lw=3, alpha=0.35)


def _floats(values: Numbers) -> list[float]:
    return [float("nan") if value is None else value for value in values]
