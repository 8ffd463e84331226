"""Parts of the tables and figures of validations and reproduced papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from reports.blocks import Block, Column, Report, Table, Text

Document = dict[str, Any]

Draw = Callable[[list[Any], Document], None]
"""Draws a document on the given axes, one for each panel."""

Section: TypeAlias = tuple[str, Block | Report]
"""A title, and what stands under it."""


def sections(titled: Iterable[Section]) -> Report:
    """Stack parts, each under its title."""
    blocks: list[Block] = []
    for title, body in titled:
        blocks += [Text(title, "heading"), *(body.blocks if isinstance(body, Report) else [body])]
    return Report("", blocks)


def bullets(lines: Iterable[str]) -> Text:
    """A list, an item a line."""
    return Text("\n".join(lines), "list")


def table(*titles: str) -> Table:
    """An empty table that sorts on a page: the first column is aligned to the left, figures to the right."""
    return Table([Column(title, left=index == 0) for index, title in enumerate(titles)], sorts=True)


def milliseconds(seconds: float) -> str:
    """Milliseconds with one digit, without the unit."""
    return f"{1e3 * seconds:.1f}"


def percent(share: float) -> str:
    """Per cent with one digit and a sign."""
    return f"{100 * share:+.1f} %"


def render(draw: Draw, document: Document, panels: int = 1, size: tuple[float, float] | None = None) -> str:
    """Draw panels side by side, as an SVG text. `size`: width and height, inches; None: by the number of panels."""
    from reports.svg import canvas, svg_text

    figure, axes = canvas(panels, panels, size or (4.2 * panels + 1, 3.8))
    draw(axes, document)
    return svg_text(figure)
