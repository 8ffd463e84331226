"""Parts of a page for what a terminal shows: its tables become tables that sort and filter, its titles headings."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.fitting_table import FittingTable
from reports.pages.tables import sortable

if TYPE_CHECKING:
    from reports.pages.frame import Part

WIDTH = 200
"""Characters in a line of whatever is neither text nor a table."""

NUMBER = re.compile(r"([+-]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*(%|ms|µs|s|x|×|GB|MB|tokens/s)?")

SMALLEST = 1e-3
"""Columns with smaller numbers stay text: the tables show four decimals."""

CHOICES = 12
"""A column of texts with at most so many different ones can be filtered."""


def parts_of(shown: RenderableType) -> list[Part]:
    """The parts of a page for something that Rich prints, in its order."""
    match shown:
        case Group():
            return [part for each in shown.renderables for part in parts_of(each)]
        case Table():
            return [_table([_plain(each.header) for each in shown.columns],
                           [[_plain(cell) for cell in each.cells] for each in shown.columns])]  # fmt: skip
        case FittingTable():
            return [_table([each.title for each in shown.columns], [list(each.cells) for each in shown.columns])]
        case Text():
            return _text(shown)
    printed = io.StringIO()
    Console(file=printed, width=WIDTH, color_system=None).print(shown)
    return [f"<pre>{escape(printed.getvalue().rstrip())}</pre>"]


def _text(text: Text) -> list[Part]:
    """A heading, a list, or lines."""
    plain = text.plain.strip()
    if not plain:
        return []
    lines = plain.splitlines()
    if "bold" in str(text.style) and len(lines) == 1:
        return [f"<h2>{escape(plain)}</h2>"]
    if all(line.startswith("- ") for line in lines):
        return ["<ul>" + "".join(f"<li>{escape(line[2:])}</li>" for line in lines) + "</ul>"]
    return ["".join(f"<p>{escape(line)}</p>" for line in lines)]


def _table(titles: Sequence[str], columns: Sequence[Sequence[str]]) -> Part:
    """A table to sort and filter. An empty first cell stands for the one above, which sorting would part it from."""
    if not columns or not columns[0]:
        return ""
    headers: list[str] = []
    values: list[Sequence[str | float | None]] = []
    for index, (title, cells) in enumerate(zip(titles, columns, strict=True)):
        found = _filled(cells) if not index else cells
        numbers, unit = _numbers(found)
        name = title if not unit or unit in title else f"{title}, {unit}".removeprefix(", ")
        headers.append(f"{name} " if name in headers else name)
        values.append(numbers or found)
    filtered = [header for header, column in zip(headers, values, strict=True) if header and _is_choice(column)]
    return sortable(headers, list(zip(*values, strict=True)), filtered)


def _numbers(cells: Sequence[str]) -> tuple[list[float | None] | None, str]:
    """The numbers of a column and their unit; no numbers if some cell is none, or units differ."""
    found = [NUMBER.fullmatch(cell.strip()) if cell.strip() not in ("", "–") else None for cell in cells]
    known = [each for each in found if each is not None]
    empty = sum(cell.strip() in ("", "–") for cell in cells)
    units = {each[2] or "" for each in known}
    if not known or len(known) + empty < len(cells) or len(units) > 1:
        return None, ""
    numbers = [None if each is None else float(each[1].replace(",", "")) for each in found]
    if any(each and abs(each) < SMALLEST for each in numbers):
        return None, ""
    return numbers, units.pop()


def _filled(cells: Sequence[str]) -> list[str]:
    filled: list[str] = []
    for cell in cells:
        filled.append(cell if cell.strip() or not filled else filled[-1])
    return filled


def _is_choice(column: Sequence[str | float | None]) -> bool:
    texts = {each for each in column if isinstance(each, str)}
    return 1 < len(texts) <= CHOICES and len(texts) < len(column) and len(column) > CHOICES / 2


def _plain(cell: RenderableType) -> str:
    if isinstance(cell, Text):
        return cell.plain
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)
