"""Converts the cells of a column to an array, table by table.

A column is first converted as a whole, at C speed. If that fails it is read cell by cell, and cells that cannot be used
become NaN (NaT among dates). The first such row, or the first out of range, is named with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from workloads.checks import MAX_TOKENS, FloatArray, IntArray, frozen
from workloads.errors import BadInput
from workloads.trace_files import Table

_DATE = re.compile(r"((?:19[7-9]\d|2[01]\d\d)-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?:Z|\+00:00)?", re.ASCII)
_NUMBER_CHARACTERS = frozenset("0123456789.+-eE")


def whole_numbers(table: Table, name: str, *, low: int) -> IntArray:
    """A column of whole numbers within [low, `MAX_TOKENS`], shape (rows,).

    12.0 is whole. In JSON true, null and "12" are no numbers.
    Raises `BadInput` naming the first row that cannot be used.
    """
    values = _numbers(table, name)
    usable = (values == np.floor(values)) & (values >= low) & (values <= MAX_TOKENS)
    _refuse_first(table, name, ~usable, f"expected a whole number from {low} to {MAX_TOKENS}")
    return frozen(values.astype(np.int64))


def seconds(table: Table, name: str, last: float = 0.0) -> FloatArray:
    """A column of times as the file has them, shape (rows,); `last` is the time of the row before the table.

    Raises `BadInput` naming the first row that is no finite time from 0 on or is earlier than the one before.
    """
    times = _numbers(table, name)
    _refuse_first(table, name, ~(np.isfinite(times) & (times >= 0.0)), "expected a finite time, 0 or later")
    _refuse_backwards(table, name, times, last)
    return times


def nanoseconds(table: Table, name: str, last: float = 0) -> IntArray:
    """A column of whole nanoseconds, shape (rows,); `last` is the time of the row before the table.

    JSON numbers are kept as they are: counted from 1970, as some clocks do, they are too long for a float.
    Raises `BadInput` naming the first row that is none, or is earlier than the row before.
    """
    whole = [_whole(table, cell) for cell in table.column(name)]
    unusable = np.array([not 0 <= value < 2**63 for value in whole])
    _refuse_first(table, name, unusable, "expected a whole number of nanoseconds, 0 or more")
    times = np.array(whole, dtype=np.int64)
    _refuse_backwards(table, name, times, last)
    return times


def timestamps(table: Table, name: str, last: float = 0) -> IntArray:
    """A column of UTC dates and times in nanoseconds, shape (rows,); `last` is the time of the row before the table.

    They look like 2023-11-16 18:15:46.6805900, with up to nine decimals, a T for the blank, and Z or +00:00
    at the end where the file has it. Raises `BadInput` naming the first row that does not, or is earlier than
    the row before.
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
    """A column of lists of block ids: how many each row has, shape (rows,), and all of them in order.

    Raises `BadInput` naming the first row that is no list of whole numbers from 0 to 2^64 - 1, or that has more ids
    than its prompt, shape (rows,) in tokens, has blocks of `block_tokens` tokens.
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
    """A column of names of sessions, text or whole numbers; None where a row belongs to none (empty, null).

    Raises `BadInput` naming the first row that has something else.
    """
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
        found = "null" if cell is None else cell
        raise BadInput(expected, file=table.file, line=table.lines[row], field=name, value=found)
