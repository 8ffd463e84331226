"""The engine loop: schedule, run, commit.

The scheduler decides (`schedulers.EngineCore`, the one that the twin drives), the executor runs, and what came out goes
to whoever asked. Time is read from a clock that is handed in, and only to be written down: no decision looks at it.

With `depth` 2 it is one step ahead: the next step is decided and launched before what this one gave is known, so that
the device never waits for the host. Whoever turns out to have ended with a step may then have a row in the next: what
that row gives is dropped. The twin's engine has the same depth.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple

from live.block_pool import BlockPool
from live.executor import Executor, Pending, Produced
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


class StepResult(NamedTuple):
    """What one step changed: who was given a token or a state, and who of all is done."""

    produced: Produced
    finished: list[Generation]


class Flight(NamedTuple):
    """A step that has been launched; and when its deciding began, or from when on it is the oldest."""

    batch: Batch
    pending: Pending
    begin: float


class Engine:
    """One engine with its model. Not thread-safe: whoever drives it owns it.

    Args:
        make_executor: what runs its batches. depth: steps that are under way at once, 1 or 2.

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
        make_executor: Callable[[Decoder, BlockPool, EngineConfig], Executor] = Executor,
        depth: int = 1,
    ) -> None:
        assert depth in (1, 2), "what a step is made of is staged in two places"
        self.core = EngineCore(config, chunks, make_cache=BlockPool)
        pool = self.core.kv
        assert isinstance(pool, BlockPool)
        self.executor = make_executor(decoder, pool, config)
        self.clock, self.watch, self.keep_times = clock, watch, False
        self._depth, self._flying = depth, deque[Flight]()

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
        """Launch as far as the engine's depth allows, and end the oldest step; None when there is nothing to run."""
        flying = self._flying
        while len(flying) < self._depth and (flight := self._launch()) is not None:
            flying.append(flight)
        if not flying:
            return None
        flight = flying.popleft()
        produced, seated = flight.pending(), flight.batch.decodes
        end = self.clock()
        if flying:  # it runs from now on
            flying[0] = flying[0]._replace(begin=end)
        if self._depth > 1:
            seated, produced = _alive(flight.batch, produced)
        finished = self._commit(flight.batch, seated, produced, end)
        if self.watch is not None:
            self.watch(flight.batch, flight.begin, end)
        return StepResult(produced, finished)

    def _launch(self) -> Flight | None:
        """Decide a step and launch it."""
        begin = self.clock()
        batch = self.core.begin_step(begin)
        if batch is None:
            return None
        for chunk in batch.chunks:
            generation = generation_of(chunk.sequence)
            if generation.scheduled < 0:
                generation.scheduled = begin
        return Flight(batch, self.executor.launch(batch), begin)

    def abort(self, number: int) -> Generation | None:
        """Take a request back between steps; None when nobody of that number is here."""
        sequence = self.core.abort(number, self.clock())
        if sequence is None:
            return None
        generation = generation_of(sequence)
        generation.ending = "abort"
        return generation

    def _commit(self, batch: Batch, seated: Many[Sequence], produced: Produced, end: float) -> list[Generation]:
        """Hand out what the step gave; `seated`: the decodes that it gave a token. Returns whoever is done."""
        stopped = []
        for i, (generation, token) in enumerate(zip(produced.decodes, produced.tokens, strict=True)):
            generation.output.append(token)
            if (token in generation.end_tokens or generation.until is not None) and generation.ends_with(token):
                stopped.append(seated[i])
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


def _alive(batch: Batch, produced: Produced) -> tuple[Many[Sequence], Produced]:
    """What a step gave to those whose answer had not ended meanwhile, and which of its decodes they are."""
    kept = [i for i, generation in enumerate(produced.decodes) if not generation.ending]
    if len(kept) == len(produced.decodes) and not batch.chunks:
        return batch.decodes, produced
    return [batch.decodes[i] for i in kept], produced._replace(
        decodes=[produced.decodes[i] for i in kept],
        tokens=[produced.tokens[i] for i in kept],
        first_tokens=[each for each in produced.first_tokens if not generation_of(each[0]).ending],
        states={each: state for each, state in produced.states.items() if not generation_of(each).ending},
        told=[each for each in produced.told if not each.generation.ending],
    )
