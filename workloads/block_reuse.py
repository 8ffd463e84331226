"""Bounds of prefix caches, from the stream of requests alone: what any cache of a size could have supplied.

A stream is a series of turns. At a turn a request looks up the leading blocks of its prompt, or it leaves blocks behind
that were not looked up. Times are numbers of turns.

- An infinite cache supplies every block that any earlier turn had.
- No cache of c blocks, whatever its policy, supplies more than `belady_hits`. Belady's rule (1966) keeps what is needed
  next. A block is worth keeping from one turn to the next that has it if that one looks it up, which makes it the
  choice of as many intervals as possible of which no more than c overlap.
- `lru_hits` is what a cache of c blocks supplies that evicts the least recently used one, by stack distances (Mattson
  et al. 1970).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from workloads.checks import IntArray
from workloads.errors import BadInput
from workloads.prefixes import SharedPrefixes
from workloads.trace import IdLists, Trace


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
