"""The engine loop: schedule a step, run it, commit its output.

`schedulers.EngineCore`, which the twin drives too, schedules; an executor runs the batch; the output goes to the
generations. The engine reads its clock only to record times: no decision depends on them.

With `depth` 2 the engine schedules and launches step i+1 before the output of step i is known (vLLM's async
scheduling), so that the device does not wait for the host. A sequence that ended in step i may still occupy a row in
step i+1; that output is discarded. The twin's engine has the same depth.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

from live.block_pool import BlockPool, HostTier
from live.executor import AsyncModelRunnerOutput, Executor, ModelRunnerOutput
from live.generation import Generation
from live.input_batch import generation_of
from live.models.decoder import Decoder
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import KVCache
from schedulers.sequence import Sequence, SubmitOptions
from schedulers.step_policies import ChunkPolicy

Clock = Callable[[], float]

Watch = Callable[[Batch, float, float], None]
"""Called after each step with its batch, its start and its end, in seconds of the engine's clock."""


class Progress(NamedTuple):
    """The changes of a step that clients see: the generations that got a token, and those that are finished."""

    advanced: list[Generation]
    finished: list[Generation]

    @classmethod
    def of(cls, output: ModelRunnerOutput, finished: list[Generation]) -> Progress:
        """The changes by the output of a step."""
        return cls([*output.decodes, *(generation_of(sequence) for sequence, _ in output.first_tokens)], finished)


class InFlightStep(NamedTuple):
    """A step that has been launched. `begin`: when its scheduling began, or when it became the oldest in flight."""

    batch: Batch
    pending: AsyncModelRunnerOutput
    begin: float


class Engine:
    """One engine with its model. It is not thread-safe.

    `depth`: steps in flight at once, 1 or 2. `make_core`: makes its scheduler on a class of KV caches. `watch`: called
    after each step. `keep_times`: record when each token came (`Generation.times`).
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        chunks: ChunkPolicy | None = None,
        *,
        clock: Clock = time.perf_counter,
        watch: Watch | None = None,
        make_executor: Callable[[Decoder, BlockPool, EngineConfig], Executor] = Executor,
        depth: int = 1,
        make_core: Callable[[type[KVCache]], EngineCore] | None = None,
    ) -> None:
        assert depth in (1, 2), "an executor has two staging buffers for the inputs of a step"
        self.core = EngineCore(config, chunks, make_cache=BlockPool) if make_core is None else make_core(BlockPool)
        pool = self.core.kv_cache
        assert isinstance(pool, BlockPool)
        self.executor = make_executor(decoder, pool, config)
        self.clock = clock
        self.watch = watch
        self.keep_times = False
        tiers = self.core.kv_tiers
        self.host_tier = None if tiers is None else HostTier(tiers, self.executor.cache, pool)
        self._depth = depth
        self._in_flight = deque[InFlightStep]()

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Unfinished requests by id, in the order of their submission."""
        return self.core.sequences

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.core.config.block_size

    @property
    def attention_block(self) -> int:
        """The same: attention pads decodes to the longest, in whole blocks."""
        return self.block_size

    def submit(
        self,
        generation: Generation,
        *,
        max_tokens: int | None = None,
        remote_prefill: bool = False,
        hold_blocks: bool = False,
    ) -> Sequence:
        """Add a request, with `SubmitOptions` as keyword arguments.

        Raises `ValueError` for an id in use, and a request that the KV cache, the context or the model cannot serve.
        """
        request = generation.request
        self._check(generation)
        generation.submitted = self.clock()
        options = SubmitOptions(max_tokens, remote_prefill, hold_blocks)
        sequence = self.core.submit(request, generation.submitted, options)
        sequence.payload = generation
        return sequence

    def reserve(self, generation: Generation) -> Sequence | None:
        """Allocate blocks for a prompt's cache on its way: see `EngineCore.reserve`. Raises as `submit`."""
        self._check(generation)
        sequence = self.core.reserve(generation.request, self.clock())
        if sequence is not None:
            sequence.payload = generation
        return sequence

    def _check(self, generation: Generation) -> None:
        """Raise ValueError for a request that the model cannot run."""
        request, decoder = generation.request, self.executor.decoder
        limit, tokens = decoder.config.max_position_embeddings, request.prompt_tokens + request.max_tokens
        if tokens > limit:
            raise ValueError(
                f"request {request.id}: expected at most the model's {limit} positions, "
                f"{tokens} prompt and output tokens are more"
            )
        if decoder.weights.head is None and (request.task == "generate" or generation.prompt_logprobs >= 0):
            raise ValueError(f"request {request.id}: expected a pooling task, since the model has no LM head")

    def step(self) -> Progress | None:
        """Launch as many steps as the depth allows and finish the oldest; None when there is nothing to run."""
        in_flight = self._in_flight
        if not self.launch():
            return None
        oldest = in_flight.popleft()
        output, decodes = oldest.pending(), oldest.batch.decodes
        end = self.clock()
        if in_flight:  # the device works on it from now on
            in_flight[0] = in_flight[0]._replace(begin=end)
        if self._depth > 1:
            decodes, output = _without_finished(oldest.batch, output)
        finished = self.commit(oldest.batch, decodes, output, end)
        if self.watch is not None:
            self.watch(oldest.batch, oldest.begin, end)
        return Progress.of(output, finished)

    def launch(self) -> bool:
        """Launch as many steps as the depth allows, without waiting for them; returns whether one is in flight."""
        while len(self._in_flight) < self._depth and (launched := self._launch()) is not None:
            self._in_flight.append(launched)
        return bool(self._in_flight)

    def _launch(self) -> InFlightStep | None:
        """Schedule a step and launch it; None when there is nothing to schedule."""
        begin = self.clock()
        batch = self.schedule(begin)
        return None if batch is None else InFlightStep(batch, self.executor.launch(batch), begin)

    def schedule(self, begin: float) -> Batch | None:
        """Schedule a step at `begin`, for a caller that runs it itself; None when there is nothing to run."""
        batch = self.core.begin_step(begin) if self.core.kv_tiers is None else self._schedule_with_tiers(begin)
        for chunk in batch.chunks if batch is not None else ():
            generation = generation_of(chunk.sequence)
            if generation.scheduled < 0:
                generation.scheduled = begin
        return batch

    def _schedule_with_tiers(self, begin: float) -> Batch | None:
        """Schedule a step, and copy blocks to and from the host tier.

        Prefixes are loaded before this returns: their sequences run in the next step, or in this one if it would be
        empty.
        """
        tiers, host = self.core.kv_tiers, self.host_tier
        assert tiers is not None
        assert host is not None
        host.store(tiers.take_stores(True))
        while True:
            batch = self.core.begin_step(begin)
            host.store(tiers.take_stores(False))
            loads = tiers.take_loads()
            for load in loads:
                host.load(load)
                self.core.finish_load(load)
            if batch is not None or not loads:
                return batch

    def abort(self, request_id: int) -> Generation | None:
        """Abort a request between steps; None when there is no such request."""
        sequence = self.core.abort(request_id, self.clock())
        if sequence is None:
            return None
        generation = generation_of(sequence)
        generation.finish_reason = "abort"
        return generation

    def commit(self, batch: Batch, decodes: Many[Sequence], output: ModelRunnerOutput, end: float) -> list[Generation]:
        """Write a step's output to its generations (of `decodes` first), end the step, and return those finished."""
        stopped = []
        for i, (generation, token) in enumerate(zip(output.decodes, output.tokens, strict=True)):
            generation.output.append(token)
            if (token in generation.end_tokens or generation.stop_check is not None) and generation.ends_with(token):
                stopped.append(decodes[i])
        if self.keep_times:
            for generation in output.decodes:
                generation.times.append(end)
        return self._end_step(batch, stopped, output, end)

    def _end_step(
        self, batch: Batch, stopped: list[Sequence], output: ModelRunnerOutput, end: float
    ) -> list[Generation]:
        """Write the output of prompts, and end the step; `stopped`: decodes whose outputs end with it."""
        if batch.chunks:
            stopped += self._commit_prompts(output, end)
        for result in output.logprobs:
            result.store()
        for sequence in stopped:
            generation_of(sequence).finish_reason = "stop"
        finished = [generation_of(sequence) for sequence in self.core.end_step(batch, stopped, end)]
        for generation in finished:
            generation.last_token = end
            generation.finish_reason = generation.finish_reason or ("length" if generation.output else "stop")
        return finished

    def _commit_prompts(self, output: ModelRunnerOutput, end: float) -> list[Sequence]:
        """Write the output of completed prompts; returns the sequences that end with their first token."""
        stopped = []
        for sequence, token in output.first_tokens:
            generation = generation_of(sequence)
            if generation.first_token < 0:
                generation.first_token = end
            generation.output.append(token)
            if self.keep_times:
                generation.times.append(end)
            if generation.ends_with(token):
                stopped.append(sequence)
        for sequence, pooled in output.pooled.items():
            generation = generation_of(sequence)
            generation.pooled_output = pooled
            generation.first_token = end
        return stopped


def _without_finished(batch: Batch, output: ModelRunnerOutput) -> tuple[Many[Sequence], ModelRunnerOutput]:
    """The decoding sequences and the output of a step, without sequences that have finished since it was launched."""
    rows = [i for i, generation in enumerate(output.decodes) if not generation.finish_reason]
    if len(rows) == len(output.decodes) and not batch.chunks:
        return batch.decodes, output
    return [batch.decodes[i] for i in rows], output._replace(
        decodes=[output.decodes[i] for i in rows],
        tokens=[output.tokens[i] for i in rows],
        first_tokens=[pair for pair in output.first_tokens if not generation_of(pair[0]).finish_reason],
        pooled={
            sequence: state for sequence, state in output.pooled.items() if not generation_of(sequence).finish_reason
        },
        logprobs=[result for result in output.logprobs if not result.generation.finish_reason],
    )
