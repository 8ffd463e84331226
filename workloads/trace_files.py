"""Reads a file into tables of cells that know the line of each row.

Two kinds of text are read, each plain or gzipped: CSV with a header, and JSON Lines with one object a line. Files that
are broken outside their cells are refused here, by a `BadInput` with the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from workloads.errors import BadInput

_GZIP_MAGIC = b"\x1f\x8b"
MAX_LINE = 1 << 24
"""Bytes of one line: room for the block ids of a prompt of about ten million tokens."""
MAX_BLANK_LINES = 100_000
"""Successive blank lines. A gzip file of 300 kB can hold 300 million."""
MAX_ROWS = 20_000_000
"""Rows of a file, which take about half a gigabyte of memory, and their prefix ids eight bytes each."""
CHUNK_ROWS = 1 << 14
"""Rows that are in memory as cells at a time."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Table(ABC):
    """Successive rows of named cells: row i stood on line `lines[i]` of `file`, the names on line `names_line`.

    There is at least one row. In JSON Lines the names are those of the first object of the file.
    """

    def __init__(self, file: Path, names: list[str], names_line: int, lines: list[int]) -> None:
        self.file, self.names, self.names_line, self.lines = file, names, names_line, lines

    @abstractmethod
    def named(self, name: str) -> bool:
        """True if the file's header, or its first object, has this name."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """True if the rows have this column; raises `BadInput` when only some of the file's rows do."""

    @abstractmethod
    def column(self, name: str) -> Sequence[Any]:
        """The raw cells of one column; raises `BadInput` when a row lacks it."""

    @abstractmethod
    def number(self, cell: object) -> float:
        """The number a raw cell holds; NaN where it holds something else."""

    def _missing(self, name: str, found: Iterable[str], line: int) -> BadInput:
        expected = f"expected this column, found only {', '.join(found) or 'none'}"
        return BadInput(expected, file=self.file, line=line, field=name)


def read_tables(path: Path) -> Iterator[Table]:
    """The rows of a file, in tables of `CHUNK_ROWS` each, at least one; JSON Lines if its first mark is a brace or a
    bracket, else CSV.
    """
    lines = _lines(path)
    head = []
    for line in lines:
        head.append(line)
        if line.strip():
            break
    whole = itertools.chain(head, lines)
    is_json = bool(head) and head[-1].lstrip().startswith(("{", "["))
    return _json_tables(path, whole) if is_json else _csv_tables(path, whole)


class CsvTable(Table):
    """Comma-separated cells under a header line. Blank lines are skipped."""

    def __init__(self, file: Path, names: list[str], names_line: int, rows: list[tuple[int, list[str]]]) -> None:
        super().__init__(file, names, names_line, [line for line, _ in rows])
        for line, row in rows:
            if len(row) != len(names):
                expected = f"expected {len(names)} ({', '.join(names)})"
                raise BadInput(expected, file=file, line=line, field="number of fields", value=len(row))
        self._columns = dict(zip(names, zip(*(row for _, row in rows), strict=True), strict=True))

    def named(self, name: str) -> bool:
        return name in self._columns

    def has(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> Sequence[Any]:
        if name not in self._columns:
            raise self._missing(name, self.names, self.names_line)
        return self._columns[name]

    def number(self, cell: object) -> float:
        text = str(cell).strip()
        return float(text) if _NUMBER.fullmatch(text) else math.nan


def _csv_tables(file: Path, text: Iterable[str]) -> Iterator[Table]:
    numbered = _csv_rows(file, text)
    names_line, header = next(numbered, (1, []))
    if not header:
        raise BadInput("expected a trace, found an empty file", file=file)
    names = [name.strip() for name in header]
    for name in names:
        if names.count(name) > 1:
            raise BadInput("expected each column once", file=file, line=names_line, field=name)
    rows = list(itertools.islice(numbered, CHUNK_ROWS))
    if not rows:
        raise BadInput("expected rows below the header, found none", file=file, line=names_line)
    while rows:
        yield CsvTable(file, names, names_line, rows)
        rows = list(itertools.islice(numbered, CHUNK_ROWS))


def _csv_rows(file: Path, text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with its line."""
    reader = csv.reader(_split_at_returns(text), strict=True)
    try:
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                yield reader.line_num, row
    except csv.Error as error:
        expected = f"expected comma-separated fields ({error})"
        raise BadInput(expected, file=file, line=reader.line_num, field="row") from None


class JsonTable(Table):
    """One JSON object a line. Blank lines are skipped, and so are keys that no column needs.

    A dot in a column's name goes into an object: `usage.prompt_tokens`.
    """

    def __init__(self, file: Path, rows: list[tuple[int, dict[str, Any]]], first: tuple[int, dict[str, Any]]) -> None:
        super().__init__(file, list(first[1]), first[0], [line for line, _ in rows])
        self._objects = [row for _, row in rows]
        self._first = first[1]

    def named(self, name: str) -> bool:
        return _cell(self._first, name) is not _ABSENT

    def has(self, name: str) -> bool:
        first = self.named(name)
        having = [_cell(row, name) is not _ABSENT for row in self._objects]
        if any(each != first for each in having):
            differing = self.lines[having.index(not first)]
            line, other = (differing, self.names_line) if first else (self.names_line, differing)
            expected = f"expected this key on every line or on none, found it on line {other} but not here"
            raise BadInput(expected, file=self.file, line=line, field=name)
        return first

    def column(self, name: str) -> Sequence[Any]:
        cells = [_cell(row, name) for row in self._objects]
        if _ABSENT in cells:
            lacking = cells.index(_ABSENT)
            raise self._missing(name, self._objects[lacking], self.lines[lacking])
        return cells

    def number(self, cell: object) -> float:
        if isinstance(cell, bool) or not isinstance(cell, int | float):
            return math.nan
        try:
            return float(cell)
        except OverflowError:
            return math.inf


_ABSENT: Final = object()


def _cell(row: dict[str, Any], name: str) -> Any:
    """The value under a name, or under a path of names with dots between them; `_ABSENT` if there is none."""
    if name in row or "." not in name:
        return row.get(name, _ABSENT)
    head, _, rest = name.partition(".")
    inner = row.get(head)
    return _cell(inner, rest) if isinstance(inner, dict) else _ABSENT


def _json_tables(file: Path, text: Iterable[str]) -> Iterator[Table]:
    numbered = ((line, _parse(file, row, line)) for line, row in enumerate(text, start=1) if not row.isspace())
    rows = list(itertools.islice(numbered, CHUNK_ROWS))
    first = rows[0]
    while rows:
        yield JsonTable(file, rows, first)
        rows = list(itertools.islice(numbered, CHUNK_ROWS))


def _parse(file: Path, text: str, line: int) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        expected = f"expected a JSON object, found broken JSON at character {error.colno} ({error.msg})"
        raise BadInput(expected, file=file, line=line, field="row", value=text.strip()) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets nested as deep
        expected = "expected a JSON object without huge numbers or deep nesting"
        raise BadInput(expected, file=file, line=line, field="row", value=text.strip()) from None
    if not isinstance(row, dict):
        raise BadInput("expected a JSON object", file=file, line=line, field="row", value=text.strip())
    return row


def _split_at_returns(lines: Iterable[str]) -> Iterator[str]:
    """Split lines that end in a carriage return alone, like those of some old files."""
    for line in lines:
        if "\r" in line:
            yield from io.StringIO(line, newline="")
        else:
            yield line


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file with their endings, unpacked and decoded lazily."""
    try:
        with path.open("rb") as file:
            packed = path.suffix == ".gz" or file.peek(2).startswith(_GZIP_MAGIC)
            yield from _bounded_lines(path, gzip.GzipFile(fileobj=file) if packed else file)
        return
    except BadInput:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        found = f"expected a whole gzip file ({error})"
    except FileNotFoundError:
        found = "expected a file, found nothing there"
    except IsADirectoryError:
        found = "expected a file, found a directory"
    except PermissionError:
        found = "expected a file that may be read, but permission is denied"
    except (OSError, ValueError) as error:  # a name too long or with a null character, a device that fails
        found = f"expected a file that can be read ({error})"
    raise BadInput(found, file=path)


def _bounded_lines(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    """See `_lines`; refuses what no trace has, before it fills the memory: a few packed bytes can be gigabytes."""
    blank = rows = 0
    for number in itertools.count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        blank = 0 if line.strip() else blank + 1
        rows += not blank
        if len(line) > MAX_LINE:
            raise BadInput(f"expected lines of at most {MAX_LINE} bytes", file=path, line=number)
        if blank > MAX_BLANK_LINES:
            raise BadInput(f"expected at most {MAX_BLANK_LINES} blank lines on end", file=path, line=number)
        if rows > MAX_ROWS:
            raise BadInput(f"expected at most {MAX_ROWS} lines that are not blank", file=path, line=number)
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadInput("expected UTF-8 text", file=path, line=number, value=line[error.start : error.end]) from None
