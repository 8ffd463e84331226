"""A recorded workload, column by column, and what prefix caches can supply of it.

Bounds of prefix caches follow from the stream of requests alone: what any cache of a size could have supplied. A stream
is a series of turns. At a turn a request looks up the leading blocks of its prompt, or it leaves blocks behind that
were not looked up. Times are numbers of turns.

- An infinite cache supplies every block that any earlier turn had.
- No cache of c blocks, whatever its policy, supplies more than `belady_hits`. Belady's rule (1966) keeps what is needed
  next. A block is worth keeping from one turn to the next that has it if that one looks it up, which makes it the
  choice of as many intervals as possible of which no more than c overlap.
- `lru_hits` is what a cache of c blocks supplies that evicts the least recently used one, by stack distances (Mattson
  et al. 1970).
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from heapq import heappop, heappush
from itertools import chain, repeat
from typing import overload

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from workloads.checks import FloatArray, IntArray, instants, token_counts, whole
from workloads.errors import BadInput
from workloads.mixes import SharedPrefixes
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
        for field, low in {"prefill_tokens": 0, "decode_tokens": 1, "sessions": -1, "agents": 0}.items():
            if (numbers := getattr(self, field)) is not None:
                object.__setattr__(self, field, token_counts(numbers, field, low=low))
        if self.arrivals is not None:
            object.__setattr__(self, "arrivals", instants(self.arrivals, "arrivals"))
        if (self.prefix_blocks is None) != (self.prefix_block_tokens is None):
            raise BadInput("expected both of prefix_blocks and prefix_block_tokens, or neither", field="Trace")
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


class BlockStream:
    """Turns: the numbers of one prompt's blocks, and how many of them it looks up."""

    def __init__(self) -> None:
        self.turns: list[tuple[list[int], int]] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, ids: Iterable[int], lookups: int) -> None:
        """Add a turn: the prefix ids of a prompt, of which the first `lookups` are looked up."""
        blocks, path, numbers = [], -1, self._numbers
        for key in ids:
            path = numbers.setdefault((path, key), len(numbers))  # the same id after another path is another block
            blocks.append(path)
        self.turns.append((blocks, lookups))

    @property
    def lookups(self) -> int:
        """Blocks that are looked up in all turns."""
        return sum(lookups for _, lookups in self.turns)

    def infinite_hits(self) -> int:
        """Blocks that are looked up and that an earlier turn had."""
        cached, hits = bytearray(len(self._numbers)), 0
        for blocks, lookups in self.turns:
            for block in blocks[:lookups]:
                hits += cached[block]
            for block in blocks:
                cached[block] = 1
        return hits

    def belady_hits(self, capacity: int) -> int:
        """The most blocks that a cache of `capacity` blocks can supply, knowing all turns."""
        cache: dict[int, int] = {}  # by block, the turn that looks it up next
        farthest: list[tuple[int, int, int]] = []
        next_use, hits = self._next_lookups(), 0
        for turn, (blocks, lookups) in enumerate(self.turns):
            for i, block in enumerate(blocks):
                if cache.pop(block, -1) == turn and i < lookups:
                    hits += 1
            for depth, (block, use) in enumerate(zip(blocks, next_use[turn], strict=True)):
                if use >= 0:
                    cache[block] = use
                    heappush(farthest, (-use, -depth, block))
            while len(cache) > capacity:
                use, _, block = heappop(farthest)
                if cache.get(block, -1) == -use:
                    del cache[block]
        return hits

    def _next_lookups(self) -> list[list[int]]:
        """The next turn that has each block of each turn, if that one looks it up; otherwise -1."""
        following: dict[int, int] = {}
        lookups_of_turns: list[list[int]] = [[]] * len(self.turns)
        for turn in range(len(self.turns) - 1, -1, -1):
            blocks, lookups = self.turns[turn]
            lookups_of_turns[turn] = [following.get(block, -1) for block in blocks]
            for i, block in enumerate(blocks):
                following[block] = turn if i < lookups else -1
        return lookups_of_turns

    def lru_hits(self, capacities: Sequence[int]) -> NDArray[np.int64]:
        """Blocks that least-recently-used caches of these sizes supply, if they hold the longest turn."""
        distances = np.sort(np.array(self._stack_distances(), dtype=np.int64))
        return np.searchsorted(distances, np.array(capacities), side="right")

    def _stack_distances(self) -> list[int]:
        """The places in the stack, from 1, of all blocks that are looked up and that an earlier turn had."""
        size = sum(len(blocks) for blocks, _ in self.turns)
        tree = [0] * (size + 1)  # Fenwick tree: marks the latest use of every block, by the number of that use

        def mark(place: int, change: int) -> None:
            while place <= size:
                tree[place] += change
                place += place & -place

        def count(place: int) -> int:
            total = 0
            while place:
                total += tree[place]
                place &= place - 1
            return total

        latest: dict[int, int] = {}
        distances, uses = [], 0
        for blocks, lookups in self.turns:
            for block in blocks[:lookups]:
                if block in latest:
                    distances.append(len(latest) - count(latest[block]) + 1)
            for block in reversed(blocks):
                if block in latest:
                    mark(latest[block], -1)
                uses += 1
                latest[block] = uses
                mark(uses, 1)
        return distances


BLOCK_TOKENS = 16
"""Tokens of a block, as of an engine's default."""

HALVINGS = 12
"""Steps of the search for the share of a trace's prompts that keep their prefixes."""


def common_beginning(prompts: IntArray, share: float) -> SharedPrefixes | None:
    """One beginning of all prompts, of which a warm cache supplies the share of all tokens; None for 0.

    The last token of a prompt is always computed: `BadInput` for more than the mean prompt leaves.
    """
    beginnings = np.arange(0, int(prompts.mean()) + 1, BLOCK_TOKENS)
    supplied = [np.minimum(tokens, prompts - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in beginnings]
    shares = np.array([tokens.sum() for tokens in supplied]) / prompts.sum()
    if share > shares[-1]:
        expected = f"expected at most {shares[-1]:.2f}: prompts share a beginning no longer than the mean prompt"
        raise BadInput(expected, field="workload.hit_rate", value=share)
    tokens = int(beginnings[int(np.argmin(np.abs(shares - share)))])
    return SharedPrefixes(1, tokens, BLOCK_TOKENS) if tokens else None


@lru_cache(4)  # every candidate of a plan has the same
def thinned(trace: Trace, share: float) -> Trace:
    """The trace in which random prompts share nothing with others, so that hits have this share; else `BadInput`."""
    assert trace.prefix_blocks is not None
    assert trace.prefix_block_tokens is not None
    ranks = np.random.default_rng(0).permutation(len(trace)) / len(trace)
    blocks = [list(ids) for ids in trace.prompt_blocks(slice(None))]
    lookups = [max(prompt - 1, 0) // trace.prefix_block_tokens for prompt in trace.prefill_tokens.tolist()]
    per_block = trace.prefix_block_tokens / int(trace.prefill_tokens.sum())

    def hits(kept: float) -> float:
        stream = BlockStream()
        for ids, looked_up, rank in zip(blocks, lookups, ranks.tolist(), strict=True):
            if rank < kept:
                stream.add(ids, min(looked_up, len(ids)))
        return stream.infinite_hits() * per_block

    highest = hits(1.0)
    if share > highest + 1e-9:
        expected = f"expected at most {highest:.3f}, which is what the trace {trace.name} has"
        raise BadInput(expected, field="workload.hit_rate", value=share)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if hits(middle) < share else (low, middle)
    fresh = iter(range(2**63, 2**64))
    ids = [ids if rank < high else [next(fresh) for _ in ids] for ids, rank in zip(blocks, ranks.tolist(), strict=True)]
    return replace(trace, prefix_blocks=IdLists.of(ids))
