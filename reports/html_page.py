"""Parts of HTML pages: tables and cells."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A table of HTML cells."""
    return help_table(dict.fromkeys(headers, ""), rows)


def help_table(headers: Mapping[str, str], rows: list[list[str]]) -> str:
    """A table of HTML cells; each header with what it means, shown where the pointer rests, or ""."""
    head = "".join(
        f'<th title="{escape(text)}">{escape(header)}</th>' if text else f"<th>{escape(header)}</th>"
        for header, text in headers.items()
    )
    lines = "\n".join("<tr>" + "".join(f"<td>{each}</td>" for each in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{lines}</table></div>'


def cell(value: object) -> str:
    """A value as HTML: numbers with five digits, lists with dashes between."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return " – ".join(cell(each) for each in value)
    return escape(str(value))
