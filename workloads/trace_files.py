"""From a file to a table of cells that remembers the line of each row.

Two kinds of text are read, each plain or gzipped: CSV with a header, and JSON Lines with one object a line.
Whatever a file can have wrong with it before a cell is looked at is refused here, as `BadInput` with the file
and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from workloads.errors import BadInput

_GZIP_MAGIC = b"\x1f\x8b"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Table(ABC):
    """Rows of named cells: row i stood on line `lines[i]` of `file`, the names on line `names_line`.

    There is at least one row. In JSON Lines the names are those of the first object.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[int] = []
        self.names: list[str] = []
        self.names_line = 1

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the rows have this column; raises `BadInput` when only some do."""

    @abstractmethod
    def column(self, name: str) -> Sequence[Any]:
        """The raw cells of one column; raises `BadInput` when a row lacks it."""

    @abstractmethod
    def number(self, cell: object) -> float:
        """The number a raw cell holds; NaN where it holds something else."""

    def _missing(self, name: str, found: Iterable[str], line: int) -> BadInput:
        expected = f"expected this column, found only {', '.join(found) or 'none'}"
        return BadInput(expected, file=self.file, line=line, field=name)


def read_table(path: Path) -> Table:
    """The table in a file: JSON Lines if its first mark is a brace or a bracket, else CSV."""
    text = _read_text(path)
    return JsonTable(path, text) if text.lstrip().startswith(("{", "[")) else CsvTable(path, text)


class CsvTable(Table):
    """Comma-separated cells under a header line. Blank lines are skipped."""

    def __init__(self, file: Path, text: str) -> None:
        super().__init__(file)
        header, *rows = self._rows(text) or [[]]
        if not header:
            raise BadInput("expected a trace, found an empty file", file=file)
        self.names_line, *self.lines = self.lines
        self.names = [name.strip() for name in header]
        for name in self.names:
            if self.names.count(name) > 1:
                raise BadInput("expected each column once", file=file, line=self.names_line, field=name)
        for line, row in zip(self.lines, rows, strict=True):
            if len(row) != len(header):
                expected = f"expected {len(header)} ({', '.join(self.names)})"
                raise BadInput(expected, file=file, line=line, field="number of fields", value=len(row))
        if not rows:
            raise BadInput("expected rows below the header, found none", file=file, line=self.names_line)
        self._columns = dict(zip(self.names, zip(*rows, strict=True), strict=True))

    def has(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> Sequence[Any]:
        if name not in self._columns:
            raise self._missing(name, self.names, self.names_line)
        return self._columns[name]

    def number(self, cell: object) -> float:
        text = str(cell).strip()
        return float(text) if _NUMBER.fullmatch(text) else math.nan

    def _rows(self, text: str) -> list[list[str]]:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        rows = []
        try:
            for row in reader:
                if len(row) > 1 or (row and row[0].strip()):
                    rows.append(row)
                    self.lines.append(reader.line_num)
        except csv.Error as error:
            expected = f"expected comma-separated fields ({error})"
            raise BadInput(expected, file=self.file, line=reader.line_num, field="row") from None
        return rows


class JsonTable(Table):
    """One JSON object a line. Blank lines are skipped, and so are keys nobody asks for."""

    def __init__(self, file: Path, text: str) -> None:
        super().__init__(file)
        self._objects: list[dict[str, Any]] = []
        for line, row in enumerate(text.split("\n"), start=1):
            if row and not row.isspace():
                self._objects.append(self._parse(row, line))
                self.lines.append(line)
        self.names, self.names_line = list(self._objects[0]), self.lines[0]

    def has(self, name: str) -> bool:
        having = [name in row for row in self._objects]
        if any(having) and not all(having):
            line = self.lines[having.index(False)]
            other = self.lines[having.index(True)]
            expected = f"expected this key on every line or on none, found it on line {other} but not here"
            raise BadInput(expected, file=self.file, line=line, field=name)
        return having[0]

    def column(self, name: str) -> Sequence[Any]:
        try:
            return [row[name] for row in self._objects]
        except KeyError:
            lacking = next(i for i, row in enumerate(self._objects) if name not in row)
            raise self._missing(name, self._objects[lacking], self.lines[lacking]) from None

    def number(self, cell: object) -> float:
        if isinstance(cell, bool) or not isinstance(cell, int | float):
            return math.nan
        try:
            return float(cell)
        except OverflowError:
            return math.inf

    def _parse(self, text: str, line: int) -> dict[str, Any]:
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            expected = f"expected a JSON object, found broken JSON at character {error.colno} ({error.msg})"
            raise BadInput(expected, file=self.file, line=line, field="row", value=text.strip()) from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or brackets nested as deep
            expected = "expected a JSON object without huge numbers or deep nesting"
            raise BadInput(expected, file=self.file, line=line, field="row", value=text.strip()) from None
        if not isinstance(row, dict):
            raise BadInput("expected a JSON object", file=self.file, line=line, field="row", value=text.strip())
        return row


def _read_text(path: Path) -> str:
    data = _read_bytes(path)
    if path.suffix == ".gz" or data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(f"expected a whole gzip file ({error})", file=path) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = error.object[error.start : error.end]
        raise BadInput("expected UTF-8 text", file=path, line=line, value=found) from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        found = "expected a file, found nothing there"
    except IsADirectoryError:
        found = "expected a file, found a directory"
    except PermissionError:
        found = "expected a file that may be read, but permission is denied"
    except (OSError, ValueError) as error:  # a name too long or with a null character, a device that fails
        found = f"expected a file that can be read ({error})"
    raise BadInput(found, file=path)
