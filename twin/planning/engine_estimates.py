"""Estimates of an engine under a rate of requests, and bounds that no number of engines can pass.

The steady state of an engine is a fixed point: a step that takes T seconds decodes for λ·O·T sequences and computes
λ·P·T prompt tokens, at λ requests a second of P prompt and O answer tokens on average, and T is the time of that step.
The number of running sequences of an engine that is not full is about Poisson (M/G/∞), which gives the percentiles of
steps. Estimates order the search; only bounds, and an engine far beyond its capacity, end it for a candidate.

P counts the tokens that a prefix cache is not expected to supply. A capacity that ends the search for a candidate is
that of an engine whose cache supplies all that any cache could (`ceiling`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from latency_models.stages import Stages
from latency_models.step_time import ANY_SEQUENCE, StepTime
from scenarios.fields import Goal
from schedulers.batches import Batch, Chunk
from schedulers.engine_config import EngineConfig
from twin.planning.question import Lengths

ITERATIONS = 200
"""Iterations of a fixed point; a saturated engine leaves its limits long before."""

SHORT_ANSWER = 0.1
"""The quantile of answers whose TPOT stands for the high percentiles of TPOT."""

BEYOND = 1.25
"""A load of this many times the estimated capacity is taken as saturation without simulation."""


@dataclass(frozen=True)
class Steady:
    """The steady state of an engine.

    Attributes:
        seconds: mean of all steps. decodes: running decodes. decode_only: seconds of a step of these alone.
        with_prompt: seconds of a step with a chunk of prompt tokens too. share: of the steps that have one.
        chunks: of all attention replicas, in a step that has one. Decodes are those of one replica.
    """

    seconds: float
    decodes: float
    decode_only: float
    with_prompt: float
    share: float
    chunks: float = 1.0

    @property
    def busy(self) -> float:
        """Share of the time that prompts take."""
        return self.share * (self.with_prompt - self.decode_only) / self.seconds if self.seconds else 0.0


@dataclass(eq=False)
class EngineEstimate:
    """One engine and the lengths of its requests.

    Attributes:
        role: `both`, `prefill` (answers of one token) or `decode` (no prompts).
        stages: of a pipeline. A step is then the time from one token of a sequence to its next: batches in flight take
            turns in the slowest stage, or each passes all stages, whichever is longer.
        replicas: of attention, which share experts and so step together. Requests are spread over them evenly.
        stated: share of the prompt tokens which a prefix cache could supply that it does; None: as expected of one with
            this memory, as `supplied` is then.
        prompts: tokens of each prompt that are computed. cached: mean tokens that are not.
        max_decodes: blocks hold at least the tokens of a sequence that no other one has.
    """

    config: EngineConfig
    step_time: StepTime
    lengths: Lengths
    role: str
    stages: Stages | None = None
    replicas: int = 1
    stated: float | None = None

    def __post_init__(self) -> None:
        config, lengths, hits = self.config, self.lengths, self.lengths.hits
        self.max_tokens_in_step = config.max_num_batched_tokens * (
            1 if self.stages is None else len(self.stages.layers)
        )
        self.supplied = 0.0
        cached: NDArray[Any] = np.zeros(1)
        if hits is not None and config.enable_prefix_caching:
            self.supplied = hits.share(self.cache_blocks) if self.stated is None else self.stated
            cached = self.supplied * hits.cacheable
        self.prompts = lengths.prompts - cached
        self.cached = float(cached.mean())
        self.prompt = 0.0 if self.role == "decode" else float(self.prompts.mean())
        self.answer = 0.0 if self.role == "prefill" else float(np.maximum(lengths.answers - 1, 0).mean())
        self.context = max(lengths.context, 1.0)
        self._steady: dict[float, Steady | None] = {}
        tokens = config.num_gpu_blocks * config.block_size
        self.max_decodes = min(float(config.max_num_seqs), tokens / max(self.context - self.cached, 1.0))
        self.capacity = self._capacity()

    def under(self, scores: Mapping[str, float]) -> EngineEstimate:
        """The same engine at these scores of the unknowns of its step times."""
        return replace(self, step_time=self.step_time.vary(scores), stated=self.supplied)

    @cached_property
    def ceiling(self) -> EngineEstimate:
        """The same engine if its prefix cache supplied all that a cache of any size can."""
        return replace(self, stated=1.0) if self._caches and self.supplied != 1.0 else self

    @cached_property
    def floor(self) -> EngineEstimate:
        """The same engine if its prefix cache supplied nothing."""
        return replace(self, stated=0.0) if self.supplied else self

    @property
    def cache_blocks(self) -> float:
        """Blocks of prefixes that the engine's memory and its lower tiers hold, if nothing else is in them."""
        tiers = self.config.kv_offloading.tiers if self.config.kv_offloading is not None else ()
        blocks = self.config.num_gpu_blocks * self.config.block_size / self.config.prefix_id_tokens
        return blocks + sum(tier.capacity for tier in tiers)

    @property
    def _caches(self) -> bool:
        return self.config.enable_prefix_caching and self.lengths.hits is not None

    @property
    def requests_until_warm(self) -> float:
        """Requests of this engine until its prefix cache, empty at first, supplies what it does in the long run."""
        return self.lengths.hits.settled(self.cache_blocks) if self._caches and self.lengths.hits is not None else 0.0

    def step(self, decodes: int, prompt_tokens: int, chunks: float = 1.0) -> float:
        """Seconds of a step of this many decodes of mean context, and prompt tokens of one mean prompt.

        The attention replicas together have this many decodes each, and `chunks` of so many prompt tokens.
        """
        if self.stages is not None:  # over whose batches decodes and prompt tokens are spread evenly
            if not (batches := min(len(self.stages.layers), max(decodes, prompt_tokens))):
                return 0.0
            passed, slowest = self._pass(math.ceil(decodes / batches), math.ceil(prompt_tokens / batches))
            return max(passed, batches * slowest)
        kv = round(decodes * self.context)
        if not prompt_tokens:
            return self.step_time.decode_seconds(decodes, kv, round(self.context), 1)[0] if decodes else 0.0
        before = self._before(prompt_tokens)
        return self._mixed(decodes, before, prompt_tokens, last=before == 0, chunks=chunks)

    def _mixed(self, decodes: int, before: int, tokens: int, *, last: bool, chunks: float) -> float:
        """Seconds of a replica's step with a chunk behind `before` tokens of its prompt."""
        kv, longest = round(decodes * self.context), round(self.context)
        if self.replicas == 1:
            return self.step_time.mixed_seconds(decodes, kv, longest, before, tokens, last)
        batch = Batch([Chunk(ANY_SEQUENCE, tokens, before, last)], [ANY_SEQUENCE] * decodes, kv, longest)
        return self.step_time.rank_seconds(batch, round(self.replicas * decodes + chunks * tokens))

    def _before(self, prompt_tokens: int) -> int:
        """Tokens of a mean prompt that are there before a chunk in the middle of it."""
        return round(self.cached + max((self.prompt - prompt_tokens) / 2, 0.0))

    def _pass(self, decodes: int, prompt_tokens: int) -> tuple[float, float]:
        """Seconds in which a batch passes the engine, and those that its slowest stage or link takes."""
        parts = self._parts(decodes, prompt_tokens, self._before(prompt_tokens))
        return sum(parts), max(parts)

    def _parts(self, decodes: int, prompt_tokens: int, before: int) -> list[float]:
        """Seconds of a batch in each stage and link. `before`: tokens of the prompt that are computed already."""
        chunks = [Chunk(ANY_SEQUENCE, prompt_tokens, before, before == 0)] if prompt_tokens else []
        batch = Batch(chunks, [ANY_SEQUENCE] * decodes, round(decodes * self.context), round(self.context))
        if self.stages is None:
            return [self.step_time.seconds(batch)]
        durations, link = self.step_time.stage_seconds(batch, self.stages.shares), self.stages.link
        message = self.step_time.send_seconds(batch.tokens) if link is None else link.seconds(batch.tokens)
        return [part for seconds in durations for part in (seconds, message or 0.0)][:-1]

    def steady(self, rate: float) -> Steady | None:
        """The steady state at a rate of requests per second; None if the engine is saturated."""
        if rate not in self._steady:
            self._steady[rate] = self._fixed_point(rate)
        return self._steady[rate]

    def _fixed_point(self, rate: float) -> Steady | None:
        if not self.answer:
            return self._prefill(rate)
        seconds = self.step(1, 0)
        for _ in range(ITERATIONS):
            requests = rate * seconds / self.replicas
            decodes, tokens = requests * self.answer, requests * self.prompt
            if decodes > self.max_decodes or decodes + tokens > self.max_tokens_in_step:
                return None
            state = self._mixture(decodes, tokens)
            if abs(state.seconds - seconds) <= 1e-4 * seconds:
                return state
            seconds = state.seconds
        return None

    def _prefill(self, rate: float) -> Steady | None:
        """The state of an engine without decodes, which is idle between prompts. `share` is its utilisation."""
        chunk = max(round(min(self.prompt, self.config.max_num_batched_tokens)), 1)
        full = self.config.max_num_batched_tokens
        seconds = min(self._pass(0, chunk)[1] / chunk, self._pass(0, full)[1] / full)
        share = rate / self.replicas * self.prompt * seconds
        chunks = 1 + (self.replicas - 1) * share
        duration = self.step(0, chunk, chunks)
        return Steady(duration, 0.0, 0.0, duration, share, chunks) if share < 1 else None

    def _mixture(self, decodes: float, tokens: float) -> Steady:
        """Steps of this many decodes, of which some have a chunk: this many prompt tokens a step on average."""
        count = max(round(decodes), 1)
        decode_only = self.step(count, 0)
        if not tokens:
            return Steady(decode_only, decodes, decode_only, decode_only, 0.0)
        chunk = max(round(min(max(self.prompt, tokens), self.max_tokens_in_step - decodes)), 1)
        own = min(tokens / chunk, 1.0)
        share = 1 - (1 - own) ** self.replicas  # a replica's chunk holds up all
        chunks = max(self.replicas * own / share, 1.0)
        with_prompt = self.step(count, chunk, chunks)
        seconds = decode_only + share * (with_prompt - decode_only)
        return Steady(seconds, decodes, decode_only, with_prompt, share, chunks)

    def token_seconds(self, rate: float, quantile: float | None) -> float:
        """The TPOT of a request, or a percentile over requests; infinite for a saturated engine.

        A short answer may meet more chunks than others, and a batch larger than usual.
        """
        steady = self.steady(rate)
        if steady is None:
            return math.inf
        if quantile is None:
            return steady.seconds
        reach = max(float(ndtri(quantile)), 0.0)
        steps = max(float(np.quantile(self.lengths.answers, SHORT_ANSWER)) - 1, 1.0)
        share = min(steady.share + reach * math.sqrt(steady.share * (1 - steady.share) / steps), 1.0)
        decodes = min(steady.decodes + reach * math.sqrt(steady.decodes), self.max_decodes)
        growth = self.step(max(round(decodes), 1), 0) - steady.decode_only
        return steady.decode_only + growth + share * (steady.with_prompt - steady.decode_only)

    def first_token_seconds(self, rate: float, quantile: float | None) -> float:
        """TTFT: half a step, the steps of the prompt, and a wait as in M/G/1 with the prompts' share of the time."""
        steady = self.steady(rate)
        if steady is None:
            return math.inf
        prompts = self.prompts
        prompt = float(prompts.mean() if quantile is None else np.quantile(prompts, quantile))
        decodes = round(steady.decodes)
        mean = self.prompt_seconds(max(self.prompt, 1.0), decodes, chunks=steady.chunks) - steady.decode_only
        busy = min(steady.share if not self.answer else steady.busy, 0.999)
        variation = (1 + float(np.var(prompts)) / max(self.prompt, 1.0) ** 2) / 2
        wait = busy / (1 - busy) * variation * max(mean, 0.0)
        factor = 1.0 if quantile is None else max(-math.log(1 - min(quantile, 0.9999)), 1.0)
        return self.prompt_seconds(prompt, decodes, chunks=steady.chunks) + steady.seconds / 2 + wait * factor

    def prompt_seconds(
        self, prompt: float, decodes: int = 0, cached: float | None = None, chunks: float = 1.0
    ) -> float:
        """Seconds of so many prompt tokens that have an engine's steps to themselves, beside some decodes.

        They come after those of the prompt that are `cached`; None: as many as on average.

        Chunks in a pipeline follow each other, one for each stage at a time.
        """
        budget = max(self.config.max_num_batched_tokens - decodes, 1)
        computed, seconds = round(self.cached if cached is None else cached), 0.0
        prompt = computed + math.ceil(prompt)
        if self.stages is not None:
            free = [0.0] * (2 * len(self.stages.layers) - 1)
            ends = [0.0] * len(self.stages.layers)
            while computed < prompt:
                tokens = min(budget, prompt - computed)
                seconds, computed = ends[-len(self.stages.layers)], computed + tokens
                for i, part in enumerate(self._parts(decodes, tokens, computed - tokens)):
                    seconds = free[i] = max(seconds, free[i]) + part
                ends.append(seconds)
            return seconds
        while computed < prompt:
            tokens = min(budget, prompt - computed)
            seconds += self._mixed(decodes, computed, tokens, last=computed + tokens >= prompt, chunks=chunks)
            computed += tokens
        return seconds

    def _capacity(self) -> float:
        """The highest rate with a steady state, requests per second."""
        low, high = 0.0, 1.0
        while self.steady(high) is not None and high < 1e9:
            low, high = high, 2 * high
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if self.steady(middle) is not None else (low, middle)
        return high


def bound(goal: Goal, prefill: EngineEstimate, decode: EngineEstimate) -> float | None:
    """The least value that a goal's metric can have in an engine that serves one request at a time; None: unknown."""
    if goal.of is not None or not goal.at_most or goal.metric == "e2e":
        return None
    if goal.metric in ("tpot", "itl"):
        shortest = int(decode.lengths.prompts.min()) + 1
        return decode.step_time.rank_decode_seconds(1, shortest, shortest, 1, 1)[0]
    prefill = prefill.ceiling
    prompts = prefill.prompts
    shortest_prompt = float(prompts.min()) if goal.quantile is None else float(np.quantile(prompts, goal.quantile))
    return prefill.prompt_seconds(shortest_prompt, cached=0.0)


def estimate(goal: Goal, prefill: EngineEstimate, decode: EngineEstimate, rates: tuple[float, float]) -> float:
    """The goal's metric relative to its limit, above 1 for a miss, at a rate for each engine."""
    first, later = rates
    if prefill.steady(first) is None or decode.steady(later) is None:
        return math.inf
    match goal.metric:
        case "ttft":
            return goal.ratio(prefill.first_token_seconds(first, goal.quantile))
        case "tpot" | "itl":
            return goal.ratio(decode.token_seconds(later, goal.quantile))
        case "e2e":
            answers = decode.lengths.answers
            tokens = float(answers.mean() if goal.quantile is None else np.quantile(answers, goal.quantile))
            return goal.ratio(prefill.first_token_seconds(first, None) + tokens * decode.token_seconds(later, None))
    return 0.0  # goodput and throughputs: what an engine bears
