"""Parts of all HTML pages: the frame with its style, figures, tables and cells."""

from __future__ import annotations

import json
from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4 } th { border-bottom-color: #999 }
td:first-child, th:first-child { text-align: left }
.scroll { overflow-x: auto } figure { margin: 1rem 0 } figure svg { width: 100%; max-width: 50rem; height: auto }
td { white-space: nowrap }
.answer { font-size: 1.1rem; border-left: 4px solid #1f5fa8; padding-left: .8rem }
.note { color: #555; font-size: 13px } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12px }
"""


def drawn_figures(figures: dict[str, str]) -> list[str]:
    """Figures inlined, without their XML declarations and doctypes."""
    return [f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in figures.values()]


def whole_page(title: str, body: list[str], manifest: dict[str, Any]) -> str:
    """The page around a body of HTML, and at its end the run's manifest."""
    body = [*body, "<h2>How this was made</h2>", f"<pre>{escape(json.dumps(manifest, indent=1))}</pre>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A table of HTML cells."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
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
