"""Tables in CSV files, plain or gzipped, or in Parquet files: columns by name, and errors with file and line."""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

from workloads.errors import BadInput, readable


class Columns:
    """Columns of a CSV file. Place i of every list is row i below the header."""

    def __init__(self, path: Path, names: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[int]) -> None:
        self.path = path
        self.names = tuple(names)
        self._lines = lines
        self._columns = dict(zip(names, zip(*rows, strict=True), strict=True))

    def __len__(self) -> int:
        return len(self._lines)

    def text(self, name: str) -> list[str]:
        if name not in self._columns:
            raise BadInput(f"expected this column, found {', '.join(self.names)}", field=name, file=self.path, line=1)
        return list(self._columns[name])

    def numbers(self, name: str, *, above: float = -math.inf, blank: float | None = None) -> list[float]:
        """A column of finite numbers greater than `above`; an empty cell is `blank`, where that is given."""
        cells = self.text(name)
        values = _all_numbers(cells)
        if values is not None and min(values) > above:
            return values
        values = []
        for row, cell in enumerate(cells):
            value = blank if blank is not None and not cell else _number(cell)
            if not (math.isfinite(value) and value > above):
                bound = "" if above == -math.inf else f" above {above:g}"
                raise self.fault(f"expected a finite number{bound}", row, name)
            values.append(value)
        return values

    def wholes(self, name: str, *, low: int, blank: int | None = None) -> list[int]:
        """A column of whole numbers of at least `low`; 8.0 is one. An empty cell is `blank`, where that is given."""
        counts = _all_wholes(self.text(name))
        if counts is not None and min(counts) >= low:
            return counts
        numbers = self.numbers(name, blank=None if blank is None else float(blank))
        if min(numbers) >= low and all(map(float.is_integer, numbers)):
            return list(map(int, numbers))
        values = []
        for row, value in enumerate(numbers):
            if value < low or value != math.floor(value):
                raise self.fault(f"expected a whole number of at least {low}", row, name)
            values.append(int(value))
        return values

    def where(self, keep: Sequence[bool]) -> Columns:
        """The rows that are kept."""
        rows = [row for row, selected in zip(zip(*self._columns.values(), strict=True), keep, strict=True) if selected]
        lines = [line for line, selected in zip(self._lines, keep, strict=True) if selected]
        return Columns(self.path, self.names, rows, lines)

    def fault(self, expected: str, row: int, name: str) -> BadInput:
        """The error about one cell."""
        return BadInput(expected, value=self._columns[name][row], field=name, file=self.path, line=self._lines[row])


def read_columns(path: Path) -> Columns:
    """A CSV file with a header, gzipped or not, whose blank lines are passed over; or a file that ends in .parquet."""
    if path.suffix == ".parquet":
        return _parquet_columns(path)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        rows = list(reader)
    except csv.Error as error:
        raise BadInput(f"expected a CSV file: {error}", file=path, line=reader.line_num) from None
    for name in header:
        if header.count(name) > 1:
            raise BadInput("expected each column once", value=name, file=path, line=1)
    lines: Sequence[int] = range(2, len(rows) + 2)
    if set(map(len, rows)) != {len(header)} or reader.line_num > len(rows) + 1:
        rows, lines = _numbered(path, header)
    return Columns(path, header, rows, lines)


def _numbered(path: Path, header: Sequence[str]) -> tuple[list[list[str]], list[int]]:
    """The rows of a file that has blank lines, cells of several lines or faults, and the lines on which they end."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    next(reader, None)
    rows: list[list[str]] = []
    lines: list[int] = []
    for row in reader:
        if len(row) not in (0, len(header)):
            expected = f"expected {len(header)} cells, one a column"
            raise BadInput(expected, value=len(row), file=path, line=reader.line_num)
        if row:
            rows.append(row)
            lines.append(reader.line_num)
    if not rows:
        raise BadInput("expected a header and rows below it", file=path)
    return rows, lines


def _parquet_columns(path: Path) -> Columns:
    """The columns of a Parquet file, each cell as text; a number's is the shortest that reads as the same number."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path)
    except OSError as error:
        raise BadInput(f"expected a readable Parquet file: {error}", file=path) from None
    except ArrowException as error:
        raise BadInput(f"expected a Parquet file: {error}", file=path) from None
    if not table.num_rows:
        raise BadInput("expected a row", file=path)
    cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns]
    return Columns(path, table.column_names, list(zip(*cells, strict=True)), range(1, table.num_rows + 1))


def read_text(path: Path) -> str:
    """A text file's content, unpacked if it is a gzip file, and without a byte order mark."""
    with readable(path):
        data = path.read_bytes()
        try:
            text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInput(f"expected a whole gzip file: {error}", file=path) from None
    return text


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def _all_wholes(cells: Sequence[str]) -> list[int] | None:
    """The cells as whole numbers; None where one is written otherwise."""
    try:
        return list(map(int, cells))
    except ValueError:
        return None


def _all_numbers(cells: Sequence[str]) -> list[float] | None:
    """The cells as finite numbers; None where they have to be looked at one by one."""
    try:
        values = list(map(float, cells))
    except ValueError:
        return None
    return values if math.isfinite(sum(values)) else None
