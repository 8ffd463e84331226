"""The part of an engine that profiles and replays use: our own (`live.engine`) or vLLM's (`live.vllm.backend`)."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from latency_models.sources.engine_regression import Step, describe
from latency_models.timed_runs import ProfiledRounds, Span
from live.clock import Clock
from live.device import no_garbage_collection
from live.generation import GREEDY, Generation, make_generation
from live.speculation import SpeculativeEngine
from schedulers.batches import Batch
from schedulers.sequence import Sequence


class Finished(Protocol):
    """The result of a step."""

    @property
    def finished(self) -> list[Generation]:
        """The generations that ended with it."""


class TimedEngine(Protocol):
    """An engine whose steps are timed: `watch` is called after each with its batch, its begin and its end."""

    clock: Callable[[], float]
    watch: Callable[[Batch, float, float], None] | None
    keep_times: bool

    @property
    def sequences(self) -> Mapping[int, Any]:
        """Unfinished requests by id, in the order of their submission."""

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""

    @property
    def attention_block(self) -> int:
        """Tokens to multiples of which attention pads decodes; 0 where it pads none."""

    def submit(self, generation: Generation) -> Sequence:
        """Add a request. Raises ValueError for one that the engine cannot run."""

    def step(self) -> Finished | None:
        """Run a step; None when there is nothing to run."""

    def abort(self, request_id: int) -> object:
        """Abort a request between steps."""


Tokens = npt.NDArray[np.int64]

EARLIER_PROMPTS = 16
"""Prompts that a later one may repeat."""

WARM_UP_STEPS = 40
"""Steps, of each engine that decodes, before the first round; they are discarded."""


@dataclass(frozen=True)
class ProfilingLimits:
    """Limits on the number and the size of timed steps; `resent`: the share of prompts that repeat a beginning."""

    max_prompt_tokens: int
    max_output_tokens: int
    max_num_seqs: int
    rounds: int = 120
    max_steps: int = 120
    resent: float = 0.0


class Round(NamedTuple):
    """The sequences of a round, limits of lengths, and the share of decodes that verify made-up drafts."""

    num_seqs: int
    max_prompt_tokens: int
    max_output_tokens: int
    drafted: float = 0.5


def stratified_sizes(rng: np.random.Generator, rounds: int, largest: int, power: int = 1) -> list[int]:
    """A number from 1 to `largest` for each round, one from each of `rounds` equal strata, in random order.

    With `power` 2 the strata are equal in the square root: small sizes differ more, and large ones take longer.
    """
    shares = (rng.permutation(rounds) + rng.random(rounds)) / rounds
    sizes: list[int] = np.maximum(np.ceil(largest * shares**power), 1).astype(int).tolist()
    return sizes


def sequences_left(num_seqs: int, step: int, max_steps: int) -> int:
    """Sequences that go on after `step`: all until the middle of `max_steps`, then fewer, down to 1.

    So every number of decodes occurs in many rounds, and a slow round is not fitted as a property of its number.
    """
    return min(max(-(-2 * num_seqs * (max_steps - step) // max_steps), 1), num_seqs)


class RandomRequests:
    """Requests of random tokens and lengths, numbered from 0; the share `resent` begins as an earlier one."""

    def __init__(self, rng: np.random.Generator, vocabulary: int, block_size: int, resent: float = 0.0) -> None:
        self._rng = rng
        self._vocabulary = vocabulary
        self._block_size = block_size
        self._resent = resent
        self._ids = itertools.count()
        self._earlier = deque[Tokens](maxlen=EARLIER_PROMPTS)

    def make(self, size: Round) -> Generation:
        """Another request, within the limits of a round."""
        rng = self._rng
        prompt = rng.integers(self._vocabulary, size=int(rng.integers(1, size.max_prompt_tokens + 1)))
        if self._resent:
            prompt = self._repeating(prompt, size)
        output = int(rng.integers(1, size.max_output_tokens + 1))
        return make_generation(next(self._ids), prompt, output, sampling_params=GREEDY, block_size=self._block_size)

    def _repeating(self, prompt: Tokens, size: Round) -> Tokens:
        """A prompt that for a share of requests begins as an earlier one, within the limit of its length."""
        rng, earlier = self._rng, self._earlier
        if earlier and rng.random() < self._resent:
            begin = earlier[int(rng.integers(len(earlier)))]
            prefix = begin[: int(rng.integers(1, len(begin) + 1))]
            prompt = np.concatenate((prefix, prompt))[: max(size.max_prompt_tokens, len(prefix) + 1)]
        earlier.append(prompt)
        return prompt


class Profile(ABC):
    """A profile under way: a round to warm up, then others without end; `go_on` continues it for a while."""

    def __init__(self, limits: ProfilingLimits, seed: int) -> None:
        self._limits = limits
        self._rng = np.random.default_rng([seed, 23])
        self._rounds: list[list[tuple[float, Step]]] = []
        self._turns = self._all_rounds()

    def run(self, rounds: int | None = None) -> ProfiledRounds:
        """Run further rounds, by default as many as the limits say."""
        with no_garbage_collection():
            while len(self._rounds) < (rounds or self._limits.rounds):
                next(self._turns)
        return self.take()

    def take(self) -> ProfiledRounds:
        """The rounds that have ended since the last call."""
        result = ProfiledRounds(self._rounds)
        self._rounds = []
        return result

    def _all_rounds(self) -> Iterator[None]:
        limits = self._limits
        warm_up = Round(min(limits.max_num_seqs, 4), limits.max_prompt_tokens, limits.max_output_tokens)
        yield from self._round(warm_up, WARM_UP_STEPS)
        self.take()
        while True:
            for size in self._sizes():
                yield from self._round(size, limits.max_steps)
                yield

    def _sizes(self) -> list[Round]:
        """Sizes of the rounds, as many as the limits say."""
        limits = self._limits
        largest = limits.max_num_seqs, limits.max_prompt_tokens, limits.max_output_tokens
        return list(map(Round, *(stratified_sizes(self._rng, limits.rounds, size, power=2) for size in largest)))

    @abstractmethod
    def _round(self, size: Round, max_steps: int) -> Iterator[None]:
        """Run one round, with pauses, and keep its steps."""


class EngineProfile(Profile):
    """A profile of one engine. The clock stops while a request is made up, and between turns."""

    def __init__(self, engine: TimedEngine, limits: ProfilingLimits, vocabulary: int, seed: int, clock: Clock) -> None:
        super().__init__(limits, seed)
        self._engine = engine
        self._clock = clock
        self._requests = RandomRequests(self._rng, vocabulary, engine.block_size, limits.resent)
        self._drafts: _MadeUpDrafts | None = None
        if isinstance(engine, SpeculativeEngine):
            self._drafts = _MadeUpDrafts(engine, clock, vocabulary, self._rng)
        engine.clock = clock
        clock.start()
        self._pause = contextlib.ExitStack()

    def go_on(self, steps: int) -> None:
        """Run some more steps, and stop the clock."""
        self._pause.close()
        for _ in range(steps):
            next(self._turns)
        self._pause.enter_context(self._clock.paused())

    def _sizes(self) -> list[Round]:
        sizes, rounds = super()._sizes(), self._limits.rounds
        if self._drafts is None:
            return [size._replace(drafted=0.0) for size in sizes]
        shares = (self._rng.permutation(rounds) + self._rng.random(rounds)) / rounds
        return [size._replace(drafted=share) for size, share in zip(sizes, shares.tolist(), strict=True)]

    def _round(self, size: Round, max_steps: int) -> Iterator[None]:
        """Run one round, pausing after each step. Leaves the engine empty."""
        engine = self._engine
        spans: list[Span] = []
        sequences = engine.sequences
        if self._drafts is not None:
            self._drafts.share = size.drafted
        engine.watch = lambda batch, begin, end: spans.append((batch, begin, end))
        for _ in range(size.num_seqs):
            self._submit(size)
        for i in range(1, max_steps + 1):
            result = engine.step()
            if result is None:
                break
            target = sequences_left(size.num_seqs, i, max_steps)
            for _ in result.finished:
                if len(sequences) < target:
                    self._submit(size)
            with self._clock.paused():  # a workload aborts nothing
                while len(sequences) > target:
                    engine.abort(next(reversed(sequences)))
            yield
        engine.watch = None
        self._drain()
        ends = [*(begin for _, begin, _ in spans[1:]), *(end for _, _, end in spans[-1:])]
        self._rounds.append([
            (begin, describe(batch, self._engine.attention_block, end - begin))
            for (batch, begin, _), end in zip(spans, ends, strict=True)
        ])  # fmt: skip

    def _submit(self, size: Round) -> None:
        with self._clock.paused():
            generation = self._requests.make(size)
        self._engine.submit(generation)

    def _drain(self) -> None:
        """Abort all sequences, and end the steps that were launched ahead."""
        for number in list(self._engine.sequences):
            self._engine.abort(number)
        while self._engine.step() is not None:
            pass


class _MadeUpDrafts:
    """Random drafts of a share of an engine's decodes, every other one as long as it may be.

    N-grams are looked up all the same, because that takes time, too.
    """

    def __init__(self, engine: SpeculativeEngine, clock: Clock, vocabulary: int, rng: np.random.Generator) -> None:
        self.share = 0.0
        self._drafts = engine.drafts
        self._clock = clock
        self._vocabulary = vocabulary
        self._rng = rng
        engine.core.propose = self._propose

    def _propose(self, sequence: Sequence, max_tokens: int) -> int:
        self._drafts.propose(sequence, max_tokens)
        with self._clock.paused():
            rng = self._rng
            tokens = 0
            if rng.random() < self.share:
                tokens = max_tokens if rng.random() < 0.5 else int(rng.integers(1, max_tokens + 1))
            self._drafts.drafts[sequence] = rng.integers(self._vocabulary, size=tokens).tolist()
        return tokens
