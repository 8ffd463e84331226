"""The page of a reproduced paper or a validation: its charts, its tables, and its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from reports.pages.frame import whole_page
from reports.pages.from_terminal import parts_of

if TYPE_CHECKING:
    from reports.pages.frame import Part


def reproduction_page(paper: str, tables: RenderableType, manifest: dict[str, Any], figures: Mapping[str, str]) -> str:
    """The whole page as one text; figures are inlined SVG."""
    return terminal_page(f"The {paper} paper: printed, and computed again", tables, manifest, drawn_figures(figures))


def terminal_page(title: str, tables: RenderableType, manifest: dict[str, Any], charts: Sequence[Part]) -> str:
    """A page of charts, and of the tables that a terminal shows, to sort and to filter."""
    return whole_page(title, [f"<h1>{escape(title)}</h1>", *charts, *parts_of(tables)], manifest)


def drawn_figures(figures: Mapping[str, str]) -> list[str]:
    """Figures inlined, without their XML declarations and doctypes."""
    return [f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in figures.values()]
