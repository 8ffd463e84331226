"""Reads a file into tables of cells that know the line of each row.

Two kinds of text are read, each plain or packed by gzip or xz: CSV with a header, and JSON Lines with one object a
line. Files that are broken outside their cells are refused here, by a `BadInput` with the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import lzma
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from workloads.checks import MAX_TOKENS, FloatArray, IntArray, frozen
from workloads.errors import BadInput

_GZIP_MAGIC = b"\x1f\x8b"
_XZ_MAGIC = b"\xfd7zXZ\x00"
MAX_LINE = 1 << 24
"""Bytes of one line: room for the block ids of a prompt of about ten million tokens."""
MAX_BLANK_LINES = 100_000
"""Successive blank lines. A gzip file of 300 kB can hold 300 million."""
MAX_ROWS = 20_000_000
"""Rows of a file, which take about half a gigabyte of memory, and their prefix ids eight bytes each."""
CHUNK_ROWS = 1 << 14
"""Rows that are in memory as cells at a time."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


_Names: TypeAlias = tuple[int, dict[str, Any]]
_Row: TypeAlias = tuple[int, Any]
"""A line of the file, and its cells: a list, or an object of JSON."""


def name_of(file: Path) -> str:
    """A trace's name: that of its file, without endings."""
    name = file.name.removesuffix(".gz").removesuffix(".xz")
    return name.removesuffix(".csv").removesuffix(".jsonl").removesuffix(".json")


class Table:
    """Successive rows of named cells, at least one: row i stood on line `lines[i]` of `file`.

    In JSON Lines, names are those of the first object, others are skipped, and a dot goes into an object.
    """

    def __init__(self, file: Path, first: _Names, rows: list[_Row], *, is_json: bool) -> None:
        """`first`: line and names of a CSV file's header, with their positions, or of the file's first object."""
        self.file = file
        self._is_json = is_json
        self.names_line, self._first = first
        self.lines = [line for line, _ in rows]
        self._rows = [row for _, row in rows]

    @property
    def names(self) -> list[str]:
        return list(self._first)

    def named(self, name: str) -> bool:
        """True if the file's header, or its first object, has this name."""
        return _cell(self._first, name) is not _ABSENT

    def has(self, name: str) -> bool:
        """True if the rows have this column; raises `BadInput` when only some of the file's rows do."""
        first = self.named(name)
        having = [cell is not _ABSENT for cell in self._cells(name)]
        if any(row != first for row in having):
            differing = self.lines[having.index(not first)]
            line, counterpart = (differing, self.names_line) if first else (self.names_line, differing)
            expected = f"expected this key on every line or on none, found it on line {counterpart} but not here"
            raise BadInput(expected, file=self.file, line=line, field=name)
        return first

    def column(self, name: str) -> Sequence[Any]:
        """The raw cells of one column; raises `BadInput` when a row lacks it."""
        cells = self._cells(name)
        if _ABSENT in cells:
            row = cells.index(_ABSENT)
            names, line = (self._rows[row], self.lines[row]) if self._is_json else (self._first, self.names_line)
            expected = f"expected this column, found only {', '.join(names) or 'none'}"
            raise BadInput(expected, file=self.file, line=line, field=name)
        return cells

    def number(self, cell: object) -> float:
        """The number a raw cell holds; NaN where it holds something else."""
        if not self._is_json:
            text = str(cell).strip()
            return float(text) if _NUMBER.fullmatch(text) else math.nan
        if isinstance(cell, bool) or not isinstance(cell, int | float):
            return math.nan
        try:
            return float(cell)
        except OverflowError:
            return math.inf

    def _cells(self, name: str) -> list[Any]:
        if not self._is_json:
            position = self._first.get(name)
            return [_ABSENT if position is None else row[position] for row in self._rows]
        if "." in name:
            return [_cell(row, name) for row in self._rows]
        return [row.get(name, _ABSENT) for row in self._rows]


_ABSENT: Final = object()


def _cell(row: dict[str, Any], name: str) -> Any:
    """The value under a name, or under a path of names with dots between them; `_ABSENT` if there is none."""
    if name in row or "." not in name:
        return row.get(name, _ABSENT)
    head, _, tail = name.partition(".")
    inner = row.get(head)
    return _cell(inner, tail) if isinstance(inner, dict) else _ABSENT


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
    text = itertools.chain(head, lines)
    is_json = bool(head) and head[-1].lstrip().startswith(("{", "["))
    first, rows = (_json_rows if is_json else _csv_rows)(path, text)
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        yield Table(path, first, chunk, is_json=is_json)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file, each with its line. Blank lines are skipped."""
    return _numbered_objects(path, _lines(path))


def _csv_rows(file: Path, text: Iterable[str]) -> tuple[_Names, Iterator[_Row]]:
    """The names of a CSV file with their line, and its rows: at least one."""
    numbered = _csv_cells(file, text)
    names_line, header = next(numbered, (1, []))
    if not header:
        raise BadInput("expected a trace, found an empty file", file=file)
    names = [name.strip() for name in header]
    for name in names:
        if names.count(name) > 1:
            raise BadInput("expected each column once", file=file, line=names_line, field=name)

    def rows() -> Iterator[_Row]:
        for line, cells in numbered:
            if len(cells) != len(names):
                expected = f"expected {len(names)} ({', '.join(names)})"
                raise BadInput(expected, file=file, line=line, field="number of fields", value=len(cells))
            yield line, cells

    following = rows()
    first = next(following, None)
    if first is None:
        raise BadInput("expected rows below the header, found none", file=file, line=names_line)
    return (names_line, {name: i for i, name in enumerate(names)}), itertools.chain([first], following)


def _csv_cells(file: Path, text: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_split_at_returns(text), strict=True)
    try:
        for row in reader:
            if len(row) > 1 or (row and row[0].strip()):
                yield reader.line_num, row
    except csv.Error as error:
        expected = f"expected comma-separated fields ({error})"
        raise BadInput(expected, file=file, line=reader.line_num, field="row") from None


def _json_rows(file: Path, text: Iterable[str]) -> tuple[_Names, Iterator[_Row]]:
    """The first object of a file with its line, and all of them. Blank lines are skipped."""
    numbered = _numbered_objects(file, text)
    first = next(numbered)
    return first, itertools.chain([first], numbered)


def _numbered_objects(file: Path, text: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((line, _parse(file, row, line)) for line, row in enumerate(text, start=1) if not row.isspace())


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
            start = file.peek(6)
            if start.startswith(_XZ_MAGIC):
                with lzma.LZMAFile(file) as unpacked:
                    yield from _bounded_lines(path, unpacked)
            else:
                packed = path.suffix == ".gz" or start.startswith(_GZIP_MAGIC)
                yield from _bounded_lines(path, gzip.GzipFile(fileobj=file) if packed else file)
        return
    except BadInput:
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        expected = f"expected a whole gzip file ({error})"
    except lzma.LZMAError as error:
        expected = f"expected a whole xz file ({error})"
    except FileNotFoundError:
        expected = "expected a file, found nothing there"
    except IsADirectoryError:
        expected = "expected a file, found a directory"
    except PermissionError:
        expected = "expected a file that may be read, but permission is denied"
    except (OSError, ValueError) as error:  # a name too long or with a null character, a device that fails
        expected = f"expected a file that can be read ({error})"
    raise BadInput(expected, file=path)


def _bounded_lines(path: Path, file: BinaryIO | gzip.GzipFile | lzma.LZMAFile) -> Iterator[str]:
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


_DATE = re.compile(r"((?:19[7-9]\d|2[01]\d\d)-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|\+00:00)?", re.ASCII)
_NUMBER_CHARACTERS = frozenset("0123456789.+-eE")


def whole_numbers(table: Table, name: str, *, low: int) -> IntArray:
    """A column of whole numbers within [low, `MAX_TOKENS`], (rows,), as 12.0 is; `BadInput` about the first other."""
    values = _numbers(table, name)
    usable = (values == np.floor(values)) & (values >= low) & (values <= MAX_TOKENS)
    _refuse_first(table, name, ~usable, f"expected a whole number from {low} to {MAX_TOKENS}")
    return frozen(values.astype(np.int64))


def seconds(table: Table, name: str, last: float = 0.0) -> FloatArray:
    """A column of times from 0 on that never go back, (rows,), behind `last`; `BadInput` about the first other."""
    times = _numbers(table, name)
    _refuse_first(table, name, ~(np.isfinite(times) & (times >= 0.0)), "expected a finite time, 0 or later")
    _refuse_backwards(table, name, times, last)
    return times


def nanoseconds(table: Table, name: str, last: float = 0) -> IntArray:
    """A column of whole nanoseconds behind `last`, (rows,); `BadInput` about the first other.

    Counted from 1970, as some clocks do, they are too long for a float.
    """
    numbers = [_whole(table, cell) for cell in table.column(name)]
    unusable = np.array([not 0 <= value < 2**63 for value in numbers])
    _refuse_first(table, name, unusable, "expected a whole number of nanoseconds, 0 or more")
    times = np.array(numbers, dtype=np.int64)
    _refuse_backwards(table, name, times, last)
    return times


def timestamps(table: Table, name: str, last: float = 0) -> IntArray:
    """A column of UTC dates and times as nanoseconds behind `last`, (rows,); `BadInput` about the first other.

    They look like 2023-11-16 18:15:46.6805900, with up to nine decimals, a T for the blank, and Z or +00:00 at the end.
    """
    texts = [_date_text(cell) for cell in table.column(name)]
    try:
        dates = np.array(texts, dtype="datetime64[ns]")
    except ValueError:  # such as a thirteenth month
        dates = np.array([_date(text) for text in texts])
    expected = "expected a UTC date and time such as 2023-11-16 18:15:46.6805900"
    _refuse_first(table, name, np.isnat(dates), expected)
    times = dates.astype(np.int64)
    _refuse_backwards(table, name, times, last)
    return times


def block_ids(table: Table, name: str, prompts: IntArray, block_tokens: int) -> tuple[IntArray, Iterable[int]]:
    """A column of lists of block ids: how many each row has, (rows,), and all of them in order.

    Raises `BadInput` about the first row that is no such list, or that has more ids than its prompt has blocks.
    """
    cells = table.column(name)
    if not _are_id_lists(cells):
        unusable = np.array([not _are_id_lists([cell]) for cell in cells])
        _refuse_first(table, name, unusable, "expected a list of whole numbers, 0 or more")
    counts = np.fromiter(map(len, cells), dtype=np.int64, count=len(cells))
    surplus = counts > -(-prompts // block_tokens)
    _refuse_first(table, name, surplus, f"expected at most one id for every {block_tokens} tokens of the prompt")
    return counts, chain.from_iterable(cells)


def session_names(table: Table, name: str) -> list[str | int | None]:
    """A column of names of sessions, text or numbers, None where empty; `BadInput` about the first other."""
    cells = table.column(name)
    names = [(cell.strip() or None) if isinstance(cell, str) else cell for cell in cells]
    unusable = np.array([cell is not None and type(cell) not in (str, int) for cell in names])
    _refuse_first(table, name, unusable, "expected the name or number of a session, or nothing")
    return names


def _numbers(table: Table, name: str) -> FloatArray:
    """The column as float64; NaN where a cell holds no number."""
    cells = table.column(name)
    if _look_like_numbers(cells):
        try:
            return np.array(list(map(float, cells)))
        except (ValueError, OverflowError):
            pass
    return np.array([table.number(cell) for cell in cells])


def _whole(table: Table, cell: object) -> int:
    """The whole number in a cell, of any length; -1 if there is none."""
    if type(cell) is int:
        return cell
    value = table.number(cell)
    return int(value) if value.is_integer() else -1


def _look_like_numbers(cells: Sequence[Any]) -> bool:
    kinds = set(map(type, cells))
    return kinds <= {int, float} or (kinds == {str} and _NUMBER_CHARACTERS.issuperset("".join(cells)))


def _are_id_lists(cells: Sequence[Any]) -> bool:
    if set(map(type, cells)) != {list}:
        return False
    ids = list(chain.from_iterable(cells))
    return set(map(type, ids)) <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < 2**64


def _date_text(cell: object) -> str:
    match = _DATE.fullmatch(cell.strip()) if isinstance(cell, str) else None
    return match[1] if match else "NaT"


def _date(text: str) -> np.datetime64:
    try:
        return np.datetime64(text, "ns")
    except ValueError:
        return np.datetime64("NaT", "ns")


def _refuse_backwards(table: Table, name: str, times: FloatArray | IntArray, last: float) -> None:
    back = np.concatenate(([times[0] < last], times[1:] < times[:-1]))
    _refuse_first(table, name, back, "expected a time no earlier than that of the row before; sort the file")


def _refuse_first(table: Table, name: str, unusable: npt.NDArray[np.bool_], expected: str) -> None:
    rows = np.flatnonzero(unusable)
    if rows.size:
        row = int(rows[0])
        cell = table.column(name)[row]
        value = "null" if cell is None else cell
        raise BadInput(expected, file=table.file, line=table.lines[row], field=name, value=value)
