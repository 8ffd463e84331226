"""The self-contained HTML page of a reproduced paper: its figures, its tables as on a terminal, and its origin."""

from __future__ import annotations

import io
from html import escape
from typing import Any

from rich.console import Console, RenderableType

from reports.html_page import drawn_figures, whole_page

WIDTH = 200
"""Characters in a line of the tables, like those of `twin reproduce` without a terminal."""


def reproduction_page(paper: str, tables: RenderableType, manifest: dict[str, Any], figures: dict[str, str]) -> str:
    """The whole page as one text; figures are inlined SVG."""
    return terminal_page(f"The {paper} paper: printed, and computed again", tables, manifest, figures)


def terminal_page(title: str, tables: RenderableType, manifest: dict[str, Any], figures: dict[str, str]) -> str:
    """A page of figures, and of tables as a terminal shows them."""
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(tables)
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    body = [f"<h1>{escape(title)}</h1>", *drawn_figures(figures), f"<pre>{escape(lines)}</pre>"]
    return whole_page(title, body, manifest)
