"""A table that leaves out its least important columns on a narrow terminal, and names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        cells: one a row.
        rank: columns of the highest rank are left out first, from the right; rank 0 always stays.
    """

    title: str
    cells: Sequence[str]
    rank: int = 0


class FittingTable:
    """Columns side by side, as many as fit. Cells are never cut, unless not even the columns of rank 0 fit.

    Attributes:
        columns: all of them.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = list(columns)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and below it the columns that are left out."""
        kept = list(self.columns)
        while _width(kept, console, options) > options.max_width and (rank := max(each.rank for each in kept)):
            kept.remove([each for each in kept if each.rank == rank][-1])
        yield _table(kept)
        left_out = [each.title.replace("\n", "") for each in self.columns if each not in kept]
        if left_out:
            yield Text(f"Left out for lack of width: {', '.join(left_out)}.", style="dim")


def _width(columns: Sequence[Column], console: Console, options: ConsoleOptions) -> int:
    return console.measure(_table(columns), options=options.update_width(UNLIMITED)).maximum


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right", overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    return table
