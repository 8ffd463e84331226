"""Blocks on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as Grid
from rich.text import Text as Line

from reports.blocks import Block, Cell, Column, Points, Table, Text

UNLIMITED = 10_000

STYLES = {"answer": "bold", "heading": "bold", "note": "dim", "warning": "bold red"}


def printed(blocks: Iterable[Block]) -> Group:
    """The blocks without figures and details."""
    parts: list[RenderableType] = []
    for block in blocks:
        if isinstance(block, Points) and block.table is not None:
            parts.append(_table(block.table))
        elif isinstance(block, Table) and not block.detail:
            parts.append(_table(block))
        elif isinstance(block, Text) and not block.detail:
            parts.append(_text(block, first=not parts))
    return Group(*parts)


def _text(block: Text, *, first: bool) -> Line:
    text = block.text
    if block.style == "list":
        text = "\n".join(f"- {line}" for line in text.splitlines())
    if block.style == "heading" and not first:
        text = f"\n{text}"
    return Line(text, style=STYLES.get(block.style, ""))


def _table(table: Table) -> RenderableType:
    return FittingTable(table) if table.fits else _grid(table, table.columns)


class FittingTable:
    """Columns that fit. Cells are never cut, unless not even the columns of rank 0 fit."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and below it the columns that are left out."""
        columns = list(self._table.columns)
        while self._width(columns, console, options) > options.max_width and (rank := max(c.rank for c in columns)):
            last = max(index for index, column in enumerate(columns) if column.rank == rank)
            del columns[last]
        yield _grid(self._table, columns)
        hidden = [column for column in self._table.columns if not any(column is visible for visible in columns)]
        if hidden:
            titles = ", ".join(column.title.replace("\n", "") for column in hidden)
            yield Line(f"Left out for lack of width: {titles}.", style="dim")

    def _width(self, columns: Sequence[Column], console: Console, options: ConsoleOptions) -> int:
        return console.measure(_grid(self._table, columns), options=options.update_width(UNLIMITED)).maximum


def _grid(table: Table, columns: Sequence[Column]) -> Grid:
    grid = Grid(
        box=None, pad_edge=table.edge, header_style="bold", title=table.title or None, title_justify="left",
        caption=table.caption or None, caption_justify="left",
    )  # fmt: skip
    for column in columns:
        grid.add_column(
            column.title, justify="left" if column.left else "right", overflow="fold" if table.fits else "ellipsis"
        )
    places = [index for index, column in enumerate(table.columns) if any(column is visible for visible in columns)]
    for row in table.rows:
        cells = [_text_of(row[place]) if place < len(row) else "" for place in places]
        grid.add_row(*cells, style="dim" if cells and cells[0].startswith("  ") else None)
    return grid


def _text_of(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text
