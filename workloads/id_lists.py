"""Many short lists of numbers in one array: the prefix blocks of the requests of a trace."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from workloads.checks import IntArray


class IdLists(Sequence[tuple[int, ...]]):
    """A read-only sequence of tuples of whole numbers below 2^64, eight bytes each. Equal to a tuple of tuples."""

    def __init__(self, counts: IntArray, ids: npt.NDArray[np.uint64]) -> None:
        """`counts` are the lengths of the tuples, shape (n,); `ids` all their numbers, shape (Σ counts,)."""
        self._ends = np.concatenate(([0], np.cumsum(counts)))
        self._ids = ids

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> IdLists:
        """These lists. Raises OverflowError for a number outside 0 to 2^64 - 1."""
        counts, ids = array("q"), array("Q")
        for each in lists:
            counts.append(len(each))
            ids.extend(each)
        return cls(np.array(counts, dtype=np.int64), np.array(ids, dtype=np.uint64))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        i = index % len(self)
        return tuple(self._ids[self._ends[i] : self._ends[i + 1]].tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IdLists):
            return np.array_equal(self._ends, other._ends) and np.array_equal(self._ids, other._ids)
        return isinstance(other, tuple) and len(other) == len(self) and all(map(tuple.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def tobytes(self) -> bytes:
        """The lengths and numbers as bytes, for a digest."""
        return self._ends.tobytes() + self._ids.tobytes()

    def __repr__(self) -> str:
        return f"<{len(self)} lists of {len(self._ids)} ids>"
