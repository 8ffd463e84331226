"""Shared prefixes: prompts that begin with one of a few rubrics, policies or retrieval templates.

Blocks of a rubric that are in the cache need not be computed again (Prelude, section 3).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from workloads.checks import FloatArray, IntArray, number, whole
from workloads.mixes import Choice, zipf_weights

PrefixStream: TypeAlias = Callable[[IntArray], Iterable[tuple[int, ...]]]
"""Called with the next n prompts' lengths, it gives the ids of each prompt's leading blocks, lazily."""

MAX_GROUPS = 10**7
"""Maximum number of rubrics. Each takes 16 bytes in a table of probabilities."""

REMEMBERED_RUBRICS = 1024
"""Number of rubrics whose block ids are kept."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Each request belongs to one of `groups` rubrics (weight i^-zipf), whose `tokens` tokens its prompt begins with.

    A shorter prompt is the beginning of the rubric. An id stands for `block_tokens` tokens. The rest of a prompt is
    unique, and its blocks have ids only with `cache_suffix`, so that a cache fills with blocks that will not be used
    again; this costs time. `BadInput` unless 1 <= groups <= 1e7, tokens >= 1, block_tokens >= 1 and zipf >= 0.
    """

    groups: int
    tokens: int
    block_tokens: int
    zipf: float = 0.0
    cache_suffix: bool = False

    def __post_init__(self) -> None:
        whole(self.groups, "groups", low=1, high=MAX_GROUPS)
        whole(self.tokens, "tokens", low=1)
        whole(self.block_tokens, "block_tokens", low=1)
        number(self.zipf, "zipf", low=0, high=sys.float_info.max)

    @property
    def shared_blocks(self) -> int:
        """Number of full blocks of one rubric. Those of rubric g have the ids from g times this number on."""
        return self.tokens // self.block_tokens

    @property
    def probabilities(self) -> FloatArray:
        """Probabilities P(a request belongs to rubric g) at index g, summing to 1; read-only."""
        return self._choice.probabilities

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """The rubrics of `size` requests, independent indices from 0 up, shape (size,)."""
        return self._choice.sample(rng, size)

    def stream(self, rng: np.random.Generator) -> PrefixStream:
        """A source of prefix blocks, which do not depend on the size of a draw; `rng` is now its own."""
        return self._with_suffix(rng) if self.cache_suffix else self._shared(rng)

    def _shared(self, rng: np.random.Generator) -> PrefixStream:
        rubric = self._rubrics()

        def following(prompts: IntArray) -> Iterable[tuple[int, ...]]:
            groups = self.sample(rng, len(prompts)).tolist()
            blocks = (prompts // self.block_tokens).tolist()
            return (rubric(group)[:num_blocks] for group, num_blocks in zip(groups, blocks, strict=True))

        return following

    def _with_suffix(self, rng: np.random.Generator) -> PrefixStream:
        shared = self._shared(rng)
        fresh = self.groups * self.shared_blocks

        def following(prompts: IntArray) -> Iterable[tuple[int, ...]]:
            nonlocal fresh
            suffix = np.maximum(prompts // self.block_tokens - self.shared_blocks, 0)
            ends = fresh + np.cumsum(suffix)
            starts = ends - suffix
            fresh = int(ends[-1]) if len(ends) else fresh
            return (
                head + tuple(range(start, end))
                for head, start, end in zip(shared(prompts), starts.tolist(), ends.tolist(), strict=True)
            )

        return following

    def _rubrics(self) -> Callable[[int], tuple[int, ...]]:
        """The block ids of a rubric. Tuples of popular rubrics are made once, and shared by their requests."""
        blocks = self.shared_blocks

        @lru_cache(REMEMBERED_RUBRICS)
        def ids(group: int) -> tuple[int, ...]:
            return tuple(range(group * blocks, (group + 1) * blocks))

        return ids

    @cached_property
    def _choice(self) -> Choice:
        return Choice(zipf_weights(self.groups, self.zipf))
