"""The `workload` section of a serving scenario."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.limits import (
    PREFIX_IDS,
    BlockTokens,
    Clients,
    Models,
    PositiveTokens,
    PrefixGroups,
    Requests,
)
from scenarios.workload import LengthSpec, TraceSpec, UniformLengths
from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.mixes import ModelMix, TaskMix, TaskShare
from workloads.pairs import Independent, LengthPairs
from workloads.prefixes import REMEMBERED_RUBRICS, SharedPrefixes
from workloads.traces import Trace

SMALLEST_CV = 1e-3
"""Smallest coefficient of variation of gamma-distributed times, as in `workloads.arrivals.Gamma`."""


class ClosedLoopSpec(Strict):
    """A closed loop: each of `concurrency` clients sends its next request `think` seconds after its last answer.

    `think_cv`: coefficient of variation of those seconds, gamma-distributed. With 0 they never vary, and clients that
    are answered together stay in step.
    """

    process: Literal["closed_loop"]
    concurrency: Clients
    think: NonNegativeFloat = 0.0
    think_cv: float = Field(default=0.0, ge=0, le=100)

    @model_validator(mode="after")
    def _can_vary(self) -> ClosedLoopSpec:
        if 0 < self.think_cv < SMALLEST_CV:
            raise ValueError(f"think_cv: expected 0, or at least {SMALLEST_CV}")
        return self

    def pauses(self, rng: np.random.Generator) -> Callable[[], float]:
        """A function that draws the seconds between an answer and a client's next request."""
        if not (self.think and self.think_cv):
            return lambda: self.think
        shape = self.think_cv**-2
        return lambda: float(rng.gamma(shape, self.think / shape))


class OpenLoopSpec(Strict):
    """Open arrivals of `rate` requests a second, independent of answers; `cv` is the gaps' variation under gamma."""

    process: Literal["poisson", "gamma", "deterministic"]
    rate: PositiveFloat
    cv: PositiveFloat = 1.0

    def build(self) -> Arrivals:
        """The arrival process."""
        match self.process:
            case "poisson":
                return Poisson(self.rate)
            case "gamma":
                return Gamma(self.rate, self.cv)
            case _:
                return Deterministic(self.rate)


class ReplaySpec(Strict):
    """The trace's own arrivals. `speed` 2 plays it twice as fast."""

    process: Literal["replay"]
    speed: PositiveFloat = 1.0


class ModelsSpec(Strict):
    """`count` models named model-0, model-1, …, in order of popularity: p_i ∝ i^-zipf (0 is uniform; SUN A.2)."""

    count: Models = 1
    zipf: float = Field(default=0.0, ge=0)

    @property
    def names(self) -> list[str]:
        """The models."""
        return [f"model-{i}" for i in range(self.count)]


class PrefixesSpec(Strict):
    """Prompts that begin alike: `groups` rubrics of `tokens` tokens, of Zipf popularity. See `SharedPrefixes`."""

    groups: PrefixGroups
    tokens: PositiveTokens
    block_tokens: BlockTokens = 16
    zipf: float = Field(default=0.0, ge=0)
    cache_suffix: bool = False

    @model_validator(mode="after")
    def _ids_fit(self) -> PrefixesSpec:
        rubric = self.tokens // self.block_tokens
        total = rubric * min(self.groups, REMEMBERED_RUBRICS)
        if total > PREFIX_IDS.most:
            raise BadInput(
                f"{PREFIX_IDS.expectation(total)}; a rubric has {rubric:,}", field="tokens", value=self.tokens
            )
        return self


def _check_prompt_ids(tokens: float, prefixes: PrefixesSpec) -> None:
    """Refuse prompts with too many ids: with `cache_suffix`, every block of a prompt has one."""
    ids = int(tokens) // prefixes.block_tokens
    if ids > PREFIX_IDS.most:
        expected = f"{PREFIX_IDS.expectation(ids)}; a prompt of {tokens:g} tokens has {ids:,}"
        raise BadInput(expected, field="prefixes.block_tokens", value=prefixes.block_tokens)


class TaskSpec(Strict):
    """A kind of request: its share by `weight`, its prompts, and its answers where it has any."""

    task: Literal["generate", "classify", "embed", "score", "rerank", "prompt_logprobs"]
    weight: PositiveFloat
    prefill: LengthSpec
    decode: LengthSpec | None = None
    priority: int = 0

    @model_validator(mode="after")
    def _answers(self) -> TaskSpec:
        if (self.task == "generate") != (self.decode is not None):
            raise ValueError("expected decode, the lengths of answers, for the task generate and for no other")
        return self

    def build(self) -> TaskShare:
        """The share of a mix."""
        prompts = self.prefill.build()
        lengths = Independent(prompts, self.decode.build()) if self.decode else prompts
        return TaskShare(self.task, self.weight, lengths, self.priority)


class ServingWorkloadSpec(Strict):
    """The workload of a serving scenario.

    Attributes:
        requests: their number; by default that of the trace.
        prefill, decode: lengths of prompts and answers, or `tasks` with lengths of their own, or a `trace`.
        max_tokens: the limit that clients set; left out, each request's limit is the length of its own answer.
    """

    requests: Requests | None = None
    prefill: LengthSpec | None = None
    decode: LengthSpec | None = None
    tasks: Annotated[list[TaskSpec], Field(min_length=1)] | None = None
    trace: TraceSpec | None = None
    arrivals: Annotated[ClosedLoopSpec | OpenLoopSpec | ReplaySpec, Field(discriminator="process")]
    models: ModelsSpec = Field(default_factory=ModelsSpec)
    prefixes: PrefixesSpec | None = None
    max_tokens: PositiveTokens | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ServingWorkloadSpec:
        given = [self.prefill is not None and self.decode is not None, self.tasks is not None, self.trace is not None]
        if sum(given) != 1:
            raise ValueError("expected prefill and decode, or tasks, or a trace: one of the three")
        if self.trace is None and self.requests is None:
            raise ValueError("expected requests, the number of them, since there is no trace to count")
        if self.arrivals.process == "replay" and (self.trace is None or self.trace.pairing != "joint"):
            raise ValueError("arrivals.process replay expects a trace, of pairing joint")
        if self.prefixes is not None and self.prefixes.cache_suffix:
            for spec in (*([self.prefill] if self.prefill else []), *(task.prefill for task in self.tasks or [])):
                _check_prompt_ids(spec.high if isinstance(spec, UniformLengths) else spec.mean, self.prefixes)
        return self

    def read_trace(self, base: Path) -> Trace | None:
        """The trace, if there is one; relative paths start from `base`."""
        return None if self.trace is None else self.trace.read(base)

    def build(self, trace: Trace | None) -> Workload:
        """The workload.

        Raises:
            BadInput: replay of a trace without times, or prefixes beside those of a trace.
        """
        models = None if self.models.count == 1 else ModelMix.zipf(self.models.names, self.models.zipf)
        if trace is not None and self.prefixes is not None and self.prefixes.cache_suffix:
            _check_prompt_ids(int(trace.prefill_tokens.max()), self.prefixes)
        prefixes = SharedPrefixes(**self.prefixes.model_dump()) if self.prefixes else None
        arrivals = self.arrivals
        if isinstance(arrivals, ReplaySpec):
            assert trace is not None
            return Workload.replay(
                trace, speed=arrivals.speed, models=models, prefixes=prefixes, max_tokens=self.max_tokens
            )
        process: Arrivals = ClosedLoop() if isinstance(arrivals, ClosedLoopSpec) else arrivals.build()
        return Workload(self._content(trace), process, models, prefixes, self.max_tokens)

    def count(self, trace: Trace | None) -> int:
        """Number of requests."""
        if self.requests is not None:
            return self.requests
        assert trace is not None
        return len(trace)

    def _content(self, trace: Trace | None) -> LengthPairs | TaskMix | Trace:
        """The content of the requests. Rows of a trace are drawn with replacement, unless they have prefix ids.

        Rows with prefix ids come once and in order: a repeated prompt would be found in the prefix cache.
        """
        if trace is not None and self.trace is not None:
            if self.trace.pairing == "independent":
                return trace.pairs().independent()
            return trace.pairs() if trace.prefix_blocks is None else trace
        if self.tasks is not None:
            return TaskMix([spec.build() for spec in self.tasks])
        assert self.prefill is not None
        assert self.decode is not None
        return Independent(self.prefill.build(), self.decode.build())
