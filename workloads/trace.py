"""A recorded workload, column by column."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain, repeat
from typing import overload

import numpy as np
import numpy.typing as npt

from workloads.checks import FloatArray, IntArray, instants, token_counts, whole
from workloads.errors import BadInput
from workloads.pairs import JointEmpirical
from workloads.request import Request


class _Rows(Sequence[tuple[int, ...]]):
    """Read-only tuples of ids, the entries of which stand in columns one behind the other; `counts`: of each, (n,)."""

    def __init__(self, counts: IntArray) -> None:
        self._bounds = np.concatenate(([0], np.cumsum(counts)))

    @abstractmethod
    def _row(self, entries: slice) -> tuple[int, ...]:
        """The ids of these entries."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = index % len(self)
        return self._row(slice(self._bounds[row], self._bounds[row + 1]))


class IdLists(_Rows):
    """A read-only sequence of tuples of whole numbers below 2^64, eight bytes each. Equal to a tuple of tuples."""

    def __init__(self, counts: IntArray, ids: npt.NDArray[np.uint64]) -> None:
        """`counts` are the lengths of the tuples, shape (n,); `ids` all their numbers, shape (Σ counts,)."""
        super().__init__(counts)
        self._ids = ids

    @classmethod
    def of(cls, lists: Iterable[Sequence[int]]) -> IdLists:
        """These lists. Raises OverflowError for a number outside 0 to 2^64 - 1."""
        counts, ids = array("q"), array("Q")
        for ids_of_row in lists:
            counts.append(len(ids_of_row))
            ids.extend(ids_of_row)
        return cls(np.array(counts, dtype=np.int64), np.array(ids, dtype=np.uint64))

    def _row(self, entries: slice) -> tuple[int, ...]:
        return tuple(self._ids[entries].tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IdLists):
            return np.array_equal(self._bounds, other._bounds) and np.array_equal(self._ids, other._ids)
        return isinstance(other, tuple) and len(other) == len(self) and all(map(tuple.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def tobytes(self) -> bytes:
        """The lengths and numbers as bytes, for a digest."""
        return self._bounds.tobytes() + self._ids.tobytes()

    def __repr__(self) -> str:
        return f"<{len(self)} lists of {len(self._ids)} ids>"


class IdRanges(_Rows):
    """Tuples of ids that are ranges, so that long growing prompts are few: `counts` of each, ends included."""

    def __init__(self, counts: IntArray, starts: IntArray, ends: IntArray) -> None:
        super().__init__(counts)
        self._starts = starts
        self._ends = ends

    def _row(self, entries: slice) -> tuple[int, ...]:
        pairs = zip(self._starts[entries].tolist(), self._ends[entries].tolist(), strict=True)
        return tuple(chain.from_iterable(range(start, end + 1) for start, end in pairs))

    def tobytes(self) -> bytes:
        """The ranges as bytes, for a digest."""
        return self._bounds.tobytes() + self._starts.tobytes() + self._ends.tobytes()


def whole_column(numbers: array[int]) -> IntArray:
    """A column that shares the memory of an array of type `q`, shape (n,)."""
    return np.frombuffer(numbers, dtype=np.int64) if len(numbers) else np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded workload, column by column; row i of each column is request i.

    `arrivals` is float64, seconds since the first request, or None. Lengths are int64 with decode >= 1. `prefix_blocks`
    names each prompt's leading blocks of `prefix_block_tokens` tokens, or is None. `sessions` is the number of each
    request's session, -1 for none, or None. `pauses` is float64, the seconds between the answers that a request follows
    and its sending, or None. `agents` is the agent within its session, 0 the main one; rows of a sub-agent come behind
    the request that starts it, and the main agent's next request follows all of them.

    All arrays have shape (n,) with n >= 1 and are read-only; else `BadInput`.
    """

    name: str
    arrivals: FloatArray | None
    prefill_tokens: IntArray
    decode_tokens: IntArray
    prefix_blocks: Sequence[tuple[int, ...]] | None = None
    prefix_block_tokens: int | None = None
    sessions: IntArray | None = None
    pauses: FloatArray | None = None
    agents: IntArray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill_tokens", token_counts(self.prefill_tokens, "prefill_tokens"))
        object.__setattr__(self, "decode_tokens", token_counts(self.decode_tokens, "decode_tokens", low=1))
        if self.arrivals is not None:
            object.__setattr__(self, "arrivals", instants(self.arrivals, "arrivals"))
        if (self.prefix_blocks is None) != (self.prefix_block_tokens is None):
            raise BadInput("expected both of prefix_blocks and prefix_block_tokens, or neither", field="Trace")
        if self.sessions is not None:
            object.__setattr__(self, "sessions", token_counts(self.sessions, "sessions", low=-1))
        if self.agents is not None:
            object.__setattr__(self, "agents", token_counts(self.agents, "agents"))
        for field in ("arrivals", "decode_tokens", "prefix_blocks", "sessions", "pauses", "agents"):
            column = getattr(self, field)
            if column is not None and len(column) != len(self):
                expected = f"expected {len(self)} rows, as prefill_tokens has"
                raise BadInput(expected, field=field, value=len(column))

    def __len__(self) -> int:
        return len(self.prefill_tokens)

    def prompt_blocks(self, rows: slice) -> Iterator[tuple[int, ...]]:
        """The ids of the blocks that the prompts of `rows` fill: those beyond would be the answers'."""
        assert self.prefix_blocks is not None
        assert self.prefix_block_tokens is not None
        whole_blocks = (self.prefill_tokens[rows] // self.prefix_block_tokens).tolist()
        return (ids[:num_blocks] for ids, num_blocks in zip(self.prefix_blocks[rows], whole_blocks, strict=True))

    @cached_property
    def digest(self) -> str:
        """A digest of the content, independent of where it was read."""
        content = sha256(self.prefill_tokens.tobytes() + self.decode_tokens.tobytes())
        if self.arrivals is not None:
            content.update(self.arrivals.tobytes())
        if self.prefix_blocks is not None:
            blocks = self.prefix_blocks
            content.update((blocks if isinstance(blocks, IdRanges) else IdLists.of(blocks)).tobytes())
        for column in (self.sessions, self.pauses, self.agents):
            if column is not None:
                content.update(column.tobytes())
        return content.hexdigest()

    def pairs(self) -> JointEmpirical:
        """The joint distribution of (prefill, decode) lengths, correlation kept; always the same object."""
        return self._pairs

    @cached_property
    def _pairs(self) -> JointEmpirical:
        return JointEmpirical(self.prefill_tokens, self.decode_tokens)

    def requests(self, *, max_tokens: int | None = None, model: str = "default") -> list[Request]:
        """The requests in order; `id` is the row, so that the backend can look up `decode_tokens`.

        All get one limit, by default the longest answer, so that it reveals no length (`BadInput` below that). Without
        recorded arrivals all arrive at 0.
        """
        limit = whole(self.decode_tokens.max() if max_tokens is None else max_tokens, "max_tokens", low=1)
        if limit < self.decode_tokens.max():
            longest = f"expected at least the longest answer of the trace ({self.decode_tokens.max()} tokens)"
            raise BadInput(longest, field="max_tokens", value=max_tokens)
        arrivals = np.zeros(len(self)) if self.arrivals is None else self.arrivals
        blocks = repeat((), len(self)) if self.prefix_blocks is None else self.prompt_blocks(slice(None))
        rows = zip(arrivals.tolist(), self.prefill_tokens.tolist(), blocks, strict=True)
        return [
            Request(row, arrival, prompt, limit, model, prefix) for row, (arrival, prompt, prefix) in enumerate(rows)
        ]
