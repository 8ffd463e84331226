"""Parts of a paper's report: tables from titles and format strings, and the steps of a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import Formatter
from typing import Any

from reports.blocks import Table
from reports.layout import Document, table

MARKS = {"*": ("", "*"), "* ": (" ", "*"), "yes": ("no", "yes")}
"""Format specs of booleans, with what stands for false and true."""


class Cells(Formatter):
    """Format strings whose specs may begin with a factor: `{ttft:1e3 .1f}` shows seconds as milliseconds.

    `±` before the digits shows an interval by its middle and half its width; `MARKS` are for booleans.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in MARKS:
            return MARKS[format_spec][bool(value)]
        factor, _, digits = format_spec.rpartition(" ")
        scale = float(factor) if factor else 1
        if digits.startswith("±"):
            low, high = value
            return f"{scale * (low + high) / 2:{digits[1:]}} ± {scale * (high - low) / 2:{digits[1:]}}"
        return format(scale * value if factor else value, digits)


def rows_table(titles: str, cells: str, rows: Iterable[Document]) -> Table:
    """A row for each document: `titles` and `cells` have a column each, separated by ` | `."""
    result, formatter = table(*titles.split(" | ")), Cells()
    for row in rows:
        result.add_row(*(formatter.vformat(cell, (), row) for cell in cells.split(" | ")))
    return result


def step_shares(losses: Sequence[float]) -> list[float]:
    """The middles of the equal parts of a training that `losses` are means over, in shares of its steps."""
    return [(index + 0.5) / len(losses) for index in range(len(losses))]
