"""The engine loop: schedule, run, commit.

The scheduler decides (`schedulers.EngineCore`, the one that the twin drives), the executor runs, and what came out goes
to whoever asked. Time is read from a clock that is handed in, and only to be written down: no decision looks at it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from live.block_pool import BlockPool
from live.executor import Executor, Produced
from live.generation import Generation
from live.models.decoder import Decoder
from live.seats import generation_of
from schedulers.batches import Batch
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.sequence import Sequence

Clock = Callable[[], float]

Watch = Callable[[Batch, float, float], None]
"""Called with each step that has run, its start and its end, seconds of the engine's clock. It only looks."""


@dataclass(frozen=True)
class StepResult:
    """What one step changed: who was given a token or a state, and who of all is done."""

    produced: Produced
    finished: list[Generation]


class Engine:
    """One engine with its model. Not thread-safe: whoever drives it owns it.

    Attributes:
        core: its scheduler. executor: the model. clock: seconds. watch: looks on, if there is anybody.
        keep_times: write down when every token came (`Generation.times`).
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        chunks: ChunkPolicy | None = None,
        *,
        clock: Clock = time.perf_counter,
        watch: Watch | None = None,
    ) -> None:
        self.core = EngineCore(config, chunks, make_cache=BlockPool)
        pool = self.core.kv
        assert isinstance(pool, BlockPool)
        self.executor = Executor(decoder, pool, config)
        self.clock, self.watch, self.keep_times = clock, watch, False

    def submit(self, generation: Generation) -> Sequence:
        """Take a request in.

        Raises:
            ValueError: an id that is here already, a request that would not fit if it were alone, one that is longer
                than the model's contexts, or one for tokens where the model gives none.
        """
        request = generation.request
        longest, tokens = self.executor.decoder.config.positions, request.prompt_tokens + request.max_tokens
        if tokens > longest:
            raise ValueError(
                f"request {request.id}: expected at most the model's {longest} positions, "
                f"{tokens} prompt and output tokens are more"
            )
        if self.executor.decoder.weights.head is None and (request.task == "generate" or generation.prompt_top >= 0):
            raise ValueError(f"request {request.id}: expected a task without tokens, since the model has no LM head")
        generation.submitted = self.clock()
        sequence = self.core.submit(request, generation.submitted)
        sequence.payload = generation
        return sequence

    def step(self) -> StepResult | None:
        """Run one step; None when there is nothing to run."""
        begin = self.clock()
        batch = self.core.begin_step(begin)
        if batch is None:
            return None
        for chunk in batch.chunks:
            generation = generation_of(chunk.sequence)
            if generation.scheduled < 0:
                generation.scheduled = begin
        produced = self.executor.run(batch)
        end = self.clock()
        finished = self._commit(batch, produced, end)
        if self.watch is not None:
            self.watch(batch, begin, end)
        return StepResult(produced, finished)

    def abort(self, number: int) -> Generation | None:
        """Take a request back between steps; None when nobody of that number is here."""
        sequence = self.core.abort(number, self.clock())
        if sequence is None:
            return None
        generation = generation_of(sequence)
        generation.ending = "abort"
        return generation

    def _commit(self, batch: Batch, produced: Produced, end: float) -> list[Generation]:
        """Hand out what the step gave. Returns whoever is done."""
        stopped = []
        for i, (generation, token) in enumerate(zip(produced.decodes, produced.tokens, strict=True)):
            generation.output.append(token)
            if (token in generation.end_tokens or generation.until is not None) and generation.ends_with(token):
                stopped.append(batch.decodes[i])
        if self.keep_times:
            for generation in produced.decodes:
                generation.times.append(end)
        if batch.chunks:
            stopped += self._commit_prompts(produced, end)
        for told in produced.told:
            told.write()
        for sequence in stopped:
            generation_of(sequence).ending = "stop"
        finished = [generation_of(sequence) for sequence in self.core.end_step(batch, stopped, end)]
        for generation in finished:
            generation.last_token = end
            generation.ending = generation.ending or ("length" if generation.output else "stop")
        return finished

    def _commit_prompts(self, produced: Produced, end: float) -> list[Sequence]:
        """The same of prompts that the step has completed. Returns those whose answer ends with its first token."""
        stopped = []
        for sequence, token in produced.first_tokens:
            generation = generation_of(sequence)
            if generation.first_token < 0:
                generation.first_token = end
            generation.output.append(token)
            if self.keep_times:
                generation.times.append(end)
            if generation.ends_with(token):
                stopped.append(sequence)
        for sequence, state in produced.states.items():
            generation = generation_of(sequence)
            generation.pooled, generation.first_token = state, end
        return stopped
