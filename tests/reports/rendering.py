"""A document as lines of a terminal, as a page, and as figures."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure as Drawing
from rich.console import Console

from reports.blocks import Figure, Report
from reports.html import page
from reports.svg import drawing, figures
from reports.terminal import printed
from twin.api.run_folder import report


def lines_of(result: Report | dict[str, Any], width: int = 200) -> list[str]:
    """The lines of a terminal."""
    text = io.StringIO()
    blocks = result if isinstance(result, Report) else report(result)
    Console(file=text, width=width).print(printed(blocks))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def page_of(document: dict[str, Any], manifest: dict[str, Any] | None = None) -> str:
    return page(report(document), {} if manifest is None else manifest)


def svgs_of(document: dict[str, Any]) -> dict[str, str]:
    return figures(report(document))


def drawings_of(document: dict[str, Any]) -> dict[str, Drawing]:
    """The matplotlib figures by name."""
    return {block.name: drawing(block) for block in report(document) if isinstance(block, Figure) and block.name}
