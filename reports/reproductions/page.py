"""The page of a reproduced paper or a validation: its charts, its tables as on a terminal, and its origin."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from reports.pages.frame import whole_page

if TYPE_CHECKING:
    from reports.pages.frame import Part

WIDTH = 200
"""Characters in a line of the tables, like those of `twin reproduce` without a terminal."""


def reproduction_page(paper: str, tables: RenderableType, manifest: dict[str, Any], figures: Mapping[str, str]) -> str:
    """The whole page as one text; figures are inlined SVG."""
    return terminal_page(f"The {paper} paper: printed, and computed again", tables, manifest, drawn_figures(figures))


def terminal_page(title: str, tables: RenderableType, manifest: dict[str, Any], charts: Sequence[Part]) -> str:
    """A page of charts, and of tables as a terminal shows them."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(tables)
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return whole_page(title, [f"<h1>{escape(title)}</h1>", *charts, f"<pre>{escape(lines)}</pre>"], manifest)


def drawn_figures(figures: Mapping[str, str]) -> list[str]:
    """Figures inlined, without their XML declarations and doctypes."""
    return [f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in figures.values()]
