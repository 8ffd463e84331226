"""Parts of the tables and figures of reproduced papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.svg import svg_text

Document = dict[str, Any]
Draw = Callable[[list[Any], Document], None]
"""Draws a document on the given axes, one for each panel."""


def sections(titled: Iterable[tuple[str, RenderableType]]) -> Group:
    """Stack parts, each under its title, with an empty line between them."""
    parts: list[RenderableType] = []
    for title, body in titled:
        parts += [Text(f"\n{title}" if parts else title, style="bold"), body]
    return Group(*parts)


def disagreements(claims: Iterable[Document]) -> Text:
    """The claims that the results contradict, one a line, or `nothing`."""
    lines = [
        f"{claim['where']}, {claim['what']}: {claim['published']} printed, {claim['found']} found"
        + (f"; {claim['note']}" if claim["note"] else "")
        for claim in claims
        if not claim["agrees"]
    ]
    return bullets(lines) if lines else Text("nothing")


def bullets(lines: Iterable[str]) -> Text:
    """Lines that begin with a dash."""
    return Text("\n".join(f"- {line}" for line in lines))


def table(*columns: str) -> Table:
    """An empty table without lines: the first column is aligned to the left, figures to the right."""
    made = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made


def milliseconds(seconds: float) -> str:
    """Milliseconds with one digit, without the unit."""
    return f"{1e3 * seconds:.1f}"


def percent(share: float) -> str:
    """Per cent with one digit and a sign."""
    return f"{100 * share:+.1f} %"


def render(draw: Draw, document: Document, panels: int = 1, size: tuple[float, float] | None = None) -> str:
    """Draw panels side by side, as an SVG text. `size`: width and height, inches; None: by the number of panels."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size or (4.2 * panels + 1, 3.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = [figure.add_subplot(1, panels, 1 + index) for index in range(panels)]
    draw(axes, document)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.25, linewidth=0.6)
    return svg_text(figure)
