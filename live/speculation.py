"""Speculative decoding in the live engine: drafts from n-grams, verified in one pass of the model.

A decode with k draft tokens is k + 1 rows of the step, computed like a prompt chunk behind the sequence's cache. Each
row samples the token that would come next if the rows before it were right. The random number of a token is a function
of the request's seed and the token's position (`kernels.sampling`), so that each row samples what the engine would have
sampled without speculation. A draft token is accepted exactly if it was sampled: with the probability that the model
gives it, as the rejection rule demands of a draft without a distribution of its own. Answers are those of an engine
that does not speculate, token by token, at every temperature.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch

from live.block_pool import BlockPool
from live.engine import Clock, Engine, Progress
from live.executor import AsyncModelRunnerOutput, Executor, LogprobsResult, ModelRunnerOutput
from live.generation import Generation
from live.input_batch import Ints, generation_of
from live.models.decoder import Decoder, Inputs
from schedulers.batches import Batch, Chunk
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import KVCache
from schedulers.sequence import FINISHED, Sequence
from schedulers.speculation import SpeculativeEngineCore


class NgramLookup:
    """The n-grams of one sequence, each with the place of the token that followed it first."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(shortest, longest + 1)
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Many[int]) -> None:
        """Add the tokens that come next."""
        history = self._tokens
        for token in tokens:
            here = len(history)
            for size in self._sizes:
                if size > here:
                    break
                self._followers.setdefault(tuple(history[here - size :]), here)
            history.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def propose(self, max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens that followed the longest n-gram with which the sequence ends now."""
        history = self._tokens
        for size in reversed(self._sizes):
            if size <= len(history) and (place := self._followers.get(tuple(history[-size:]))) is not None:
                return history[place : place + max_tokens]
        return []


class NgramDrafts:
    """Drafts of decoding sequences by prompt lookup, for `SpeculativeEngineCore.propose`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._lookups: dict[Sequence, NgramLookup] = {}
        self.drafts: dict[Sequence, list[int]] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> int:
        """See `schedulers.speculation.Propose`."""
        generation = generation_of(sequence)
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = NgramLookup(self._shortest, self._longest)
            lookup.extend(generation.prompt.tolist())
        lookup.extend(generation.output[len(lookup) - len(generation.prompt) :])
        draft = self.drafts[sequence] = lookup.propose(max_tokens)
        return len(draft)

    def forget_finished(self) -> None:
        """Drop what is kept for sequences that are finished, and the drafts of the step that has ended."""
        self.drafts.clear()
        for sequence in [sequence for sequence in self._lookups if sequence.state == FINISHED]:
            del self._lookups[sequence]


class Verified(NamedTuple):
    """The outcome of one step: tokens that each decode emits, log-probabilities where wanted, prompts' output."""

    tokens: list[list[int]]
    logprobs: list[list[LogprobsResult]]
    rest: ModelRunnerOutput


class SpeculativeExecutor(Executor):
    """Runs batches whose decodes verify drafts. Their inputs are built anew in each step."""

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig, drafts: NgramDrafts) -> None:
        super().__init__(decoder, pool, config)
        self._drafts = drafts

    def launch(self, batch: Batch) -> AsyncModelRunnerOutput:
        """Refused, because its output has one token for each decode. See `verify`."""
        raise NotImplementedError("a speculative step is run by verify")

    def verify(self, batch: Batch) -> Verified:
        """Run one step: rows of decodes without a draft first, then those with one, then prompt chunks."""
        with torch.inference_mode():
            plain = [i for i, drafted in enumerate(batch.draft_tokens) if not drafted]
            order = [*plain, *(i for i, drafted in enumerate(batch.draft_tokens) if drafted)]
            pieces = []  # decodes with their drafts as chunks behind their caches
            for i in order[len(plain) :]:
                context = batch.decodes[i].num_computed_tokens
                pieces.append(Chunk(batch.decodes[i], batch.draft_tokens[i] + 1, context, False))
            hidden = self.forward(self._inputs_of(batch, [batch.decodes[i] for i in plain], pieces))
            return self._verified(batch, order, hidden)

    def _inputs_of(self, batch: Batch, plain: list[Sequence], pieces: list[Chunk]) -> Inputs:
        size, count = self.pool.block_size, len(plain)
        positions = np.array([sequence.num_computed_tokens for sequence in plain], dtype=np.int64)
        width = int(positions.max(initial=-1)) // size + 1
        tables = np.zeros((count, width), dtype=np.int32)
        for row, sequence in enumerate(plain):
            blocks = self.pool.table(sequence.blocks)[:width]
            tables[row, : len(blocks)] = blocks
        slots = tables[np.arange(count), positions // size].astype(np.int64) * size + positions % size
        last = np.array([generation_of(sequence).output[-1] for sequence in plain], dtype=np.int64)
        lengths = (positions + 1).astype(np.int32)
        return self._inputs_with((last, positions, slots), tables, lengths, [*pieces, *batch.chunks])

    def _chunk_tokens(self, chunk: Chunk) -> Ints:
        """The tokens of a prompt chunk, or of a decode with its draft, which comes behind its last token."""
        tokens = super()._chunk_tokens(chunk)
        draft = self._drafts.drafts.get(chunk.sequence, [])[: chunk.tokens - len(tokens)]
        return np.concatenate((tokens, np.array(draft, dtype=np.int64)))

    def _verified(self, batch: Batch, order: list[int], hidden: torch.Tensor) -> Verified:
        """Sample every row of the decodes and the last row of each completed prompt, and compare drafts with them."""
        owners: list[Generation] = []
        places: list[int] = []
        for i in order:
            sequence, count = batch.decodes[i], batch.draft_tokens[i] + 1
            owners += [generation_of(sequence)] * count
            places += range(sequence.num_computed_tokens + 1, sequence.num_computed_tokens + 1 + count)
        sampled, results, rest = self._sample_rows(batch, hidden, owners, places)
        tokens: list[list[int]] = [[] for _ in order]
        logprobs: list[list[LogprobsResult]] = [[] for _ in order]
        by_row = iter(results)
        row = 0
        for i in order:
            here = sampled[row : row + batch.draft_tokens[i] + 1]
            draft = self._drafts.drafts[batch.decodes[i]] if batch.draft_tokens[i] else ()
            tokens[i] = here[: num_right(draft, here) + 1]
            if owners[row].logprobs >= 0:
                logprobs[i] = [next(by_row) for _ in here][: len(tokens[i])]
            row += len(here)
        return Verified(tokens, logprobs, rest._replace(logprobs=[*rest.logprobs, *by_row]))


def num_right(draft: Many[int], sampled: Many[int]) -> int:
    """Tokens of a draft that were sampled, from the first on."""
    right = 0
    while right < len(draft) and draft[right] == sampled[right]:
        right += 1
    return right


class SpeculativeEngine(Engine):
    """An engine that verifies n-gram drafts. It runs one step at a time."""

    core: SpeculativeEngineCore
    executor: SpeculativeExecutor

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        make_core: Callable[[type[KVCache]], EngineCore],
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.drafts = drafts = NgramDrafts(prompt_lookup_min, prompt_lookup_max)

        def make_executor(decoder: Decoder, pool: BlockPool, config: EngineConfig) -> Executor:
            return SpeculativeExecutor(decoder, pool, config, drafts)

        super().__init__(decoder, config, clock=clock, make_executor=make_executor, make_core=make_core)
        self.core.propose = drafts.propose

    def step(self) -> Progress | None:
        begin = self.clock()
        batch = self.schedule(begin)
        if batch is None:
            return None
        verified = self.executor.verify(batch)
        end = self.clock()
        finished = self._commit_verified(batch, verified, end)
        if finished:
            self.drafts.forget_finished()
        if self.watch is not None:
            self.watch(batch, begin, end)
        decodes = [generation_of(sequence) for sequence in batch.decodes]
        return Progress.of(verified.rest._replace(decodes=decodes), finished)

    def abort(self, request_id: int) -> Generation | None:
        generation = super().abort(request_id)
        self.drafts.forget_finished()
        return generation

    def _commit_verified(self, batch: Batch, verified: Verified, end: float) -> list[Generation]:
        """Write a step's output to its generations, and end the step; returns the generations that are finished."""
        stopped: list[Sequence] = []
        accepted, emitted = [], []
        for i, sequence in enumerate(batch.decodes):
            generation, tokens = generation_of(sequence), verified.tokens[i]
            num_tokens = 0
            for token in tokens:
                generation.output.append(token)
                num_tokens += 1
                if generation.ends_with(token):
                    stopped.append(sequence)
                    break
            for result in verified.logprobs[i][:num_tokens]:
                result.store()
            if self.keep_times:
                generation.times.extend([end] * num_tokens)
            accepted.append(len(tokens) - 1)
            emitted.append(num_tokens)
        self.core.record_outputs(batch, accepted, emitted)
        return self._end_step(batch, stopped, verified.rest, end)
