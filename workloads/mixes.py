"""Mixes of models and of tasks, and the beginnings that their prompts share.

A mix holds weights. They need not sum to 1: an entry's probability is its share of their sum.

Prompts may begin with one of a few rubrics, policies or retrieval templates. Blocks of a rubric that are in the cache
need not be computed again (Prelude, section 3).
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias, cast

import numpy as np

from workloads.checks import FloatArray, IntArray, frozen, number, weights, whole
from workloads.errors import BadInput
from workloads.lengths import Lengths
from workloads.pairs import LengthPairs, PairStream
from workloads.request import TASKS

TaskStream: TypeAlias = Callable[[int], tuple[IntArray, IntArray, IntArray]]
"""Called with n, it gives the next n requests: index of the share, prompt and answer tokens, each of shape (n,)."""

_LARGEST = sys.float_info.max
_PRIORITIES = 2**31


def zipf_weights(size: int, skew: float) -> FloatArray:
    """Weights i^-skew for the ranks 1 ... `size` (SUN appendix A.2), (size,); `BadInput` unless skew is 0 or more."""
    exponent = number(skew, "skew", low=0, high=_LARGEST)
    with np.errstate(under="ignore"):  # a rank without weight to speak of is never drawn
        popularity: FloatArray = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    return popularity


class _Weighted(ABC):
    """Draws index i of its entries with the share of its weight: finite, 0 or more, and not all 0."""

    @abstractmethod
    def _weights(self) -> FloatArray:
        """The weights, shape (n,)."""

    @cached_property
    def probabilities(self) -> FloatArray:
        """Probabilities of the indices, shape (n,), summing to 1; read-only."""
        weights = self._weights()
        scaled = weights / weights.max()  # a sum of weights near the largest float would overflow
        return frozen(scaled / scaled.sum())

    @cached_property
    def _reached(self) -> FloatArray:
        # Where an index has no weight the running sum stands still, so not even a last such index can be drawn.
        cumulative = np.cumsum(self.probabilities)
        reached: FloatArray = cumulative / cumulative[-1]
        return reached

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        """`size` independent indices, shape (size,), each from one number of `rng`."""
        indices: IntArray = np.searchsorted(self._reached, rng.random(whole(size, "size", low=0)), side="right")
        return indices


@dataclass(frozen=True)
class ModelMix(_Weighted):
    """Requests for several models: `models[i]` gets the share of `weights[i]` in all weights.

    Raises `BadInput` unless models are named once each, with weights of 0 or more, which are not all 0.
    """

    models: Sequence[str]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        models = () if isinstance(self.models, str) else tuple(self.models)
        if not models or not all(isinstance(name, str) and name for name in models):
            raise BadInput("expected a list of one or more names", field="models", value=self.models)
        if len(set(models)) < len(models):
            twice = next(name for at, name in enumerate(models) if name in models[:at])
            raise BadInput("expected each model once", field="models", value=twice)
        parts = weights(self.weights, "weights")
        if len(parts) != len(models):
            raise BadInput(f"expected as many as models ({len(models)})", field="len(weights)", value=len(parts))
        object.__setattr__(self, "models", models)
        object.__setattr__(self, "weights", tuple(parts.tolist()))

    @classmethod
    def zipf(cls, models: Sequence[str], skew: float = 0.0) -> ModelMix:
        """A mix in which the i-th model has a weight of i^-skew; 0 is uniform. Raises `BadInput` for a skew below 0."""
        return cls(models, zipf_weights(len(models), skew).tolist())

    def _weights(self) -> FloatArray:
        return np.array(self.weights)


@dataclass(frozen=True)
class TaskShare:
    """One task of a mix: its weight among the requests, their lengths, and more of their fields (`Request`).

    `lengths` are pairs for "generate"; every other task has no answer, and lengths of the prompt. Raises `BadInput` for
    an unknown task, a bad weight or priority, and lengths of the other kind.
    """

    task: str
    weight: float
    lengths: LengthPairs | Lengths
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    ttft_goal: float = math.inf

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BadInput(f"expected one of {', '.join(TASKS)}", field="task", value=self.task)
        number(self.weight, "weight", low=0, high=_LARGEST)
        whole(self.priority, "priority", low=-_PRIORITIES, high=_PRIORITIES)
        generates = self.task == "generate"
        if not hasattr(self.lengths, "stream" if generates else "pmf"):  # either kind lacks the other's
            kind = "LengthPairs, of prompts and answers" if generates else "Lengths, of the prompts alone"
            raise BadInput(f"expected {kind}, for the task {self.task}", field="lengths", value=self.lengths)

    def stream(self, rng: np.random.Generator) -> PairStream:
        """A source of (prompt, answer) lengths independent of the size of a draw, which takes `rng` over."""
        if self.task == "generate":
            return cast(LengthPairs, self.lengths).stream(rng)
        prompts = cast(Lengths, self.lengths)
        return lambda size: (prompts.sample(rng, size), np.zeros(size, dtype=np.int64))


@dataclass(frozen=True)
class TaskMix(_Weighted):
    """Requests of several tasks, each with lengths of its own; a task may come twice. `BadInput` without a weight."""

    shares: Sequence[TaskShare]

    def __post_init__(self) -> None:
        shares = tuple(self.shares)
        if not shares or not all(isinstance(share, TaskShare) for share in shares):
            raise BadInput("expected one or more TaskShare", field="shares", value=self.shares)
        object.__setattr__(self, "shares", shares)
        weights([share.weight for share in shares], "weights")

    @property
    def is_constant(self) -> bool:
        """True if all requests are of one share and of one length."""
        shares = [share for share in self.shares if share.weight]
        return len(shares) == 1 and shares[0].lengths.is_constant

    def stream(self, rng: np.random.Generator) -> TaskStream:
        """A source of shares with their lengths, each drawn by itself, which takes `rng` over."""
        task_rng, *generators = rng.spawn(1 + len(self.shares))
        lengths = [share.stream(child) for share, child in zip(self.shares, generators, strict=True)]

        def following(size: int) -> tuple[IntArray, IntArray, IntArray]:
            indices = self.sample(task_rng, size)
            prompts, answers = np.empty_like(indices), np.empty_like(indices)
            for index, draw in enumerate(lengths):
                places = np.flatnonzero(indices == index)
                prompts[places], answers[places] = draw(len(places))
            return indices, prompts, answers

        return following

    def _weights(self) -> FloatArray:
        return np.array([share.weight for share in self.shares], dtype=np.float64)


PrefixStream: TypeAlias = Callable[[IntArray], Iterable[tuple[int, ...]]]
"""Called with the next n prompts' lengths, it gives the ids of each prompt's leading blocks, lazily."""

MAX_GROUPS = 10**7
"""Maximum number of rubrics. Each takes 16 bytes in a table of probabilities."""

REMEMBERED_RUBRICS = 1024
"""Number of rubrics whose block ids are kept."""


@dataclass(frozen=True)
class SharedPrefixes(_Weighted):
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

    def _weights(self) -> FloatArray:
        return zipf_weights(self.groups, self.zipf)
