"""Batches, run by padded steps whose inputs stay on the device.

What a step needs of the one before never passes through the host: tokens are taken from where they were drawn, block
tables stay, and a block that a token starts comes with the token's slot. So a step can be launched before the tokens
of the one before are known.

A shape is run as it is at first, which compiles its kernels. It becomes a graph when it has been met `OFTEN` times, or
when graphs of all that have been met are asked for (`settle`). On the CPU there are no graphs, and the same steps run
all the same.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import sample
from live.block_pool import BlockPool
from live.coming import Coming
from live.executor import Executor, Pending, Produced, States, place_after, read_states, wants_token
from live.graphs.buckets import Buckets, StepShape
from live.graphs.resident import Resident
from live.graphs.staging import Arrays
from live.graphs.step import Opened, Result, StaticStep
from live.graphs.wishes import Wishes
from live.likelihood import Told, of_given
from live.models.decoder import Decoder
from live.seats import Seats, generation_of
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence

OFTEN = 8
"""Making a graph is a pause as long as some steps that are launched kernel by kernel; of a shape that has been met so
often, as many more are to be expected. A guess, until a GPU has told."""

MOST_GRAPHS = 1024
"""After which shapes run as they are: a graph takes megabytes for its launches alone."""

Drawing = list[Sequence | None]
"""By chunk: whose prompt is complete with it and goes on with a token."""


class GraphExecutor(Executor):
    """As `Executor`, by padded steps. What is pending must be called before the one after the next is launched.

    Attributes:
        buckets: what steps are padded to. steps: those that have been met, by shape.
        resident: what stays on the device.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig, *, graphs: bool = True) -> None:
        super().__init__(decoder, pool, config)
        seats, kept = self.seats.tables.shape
        visiting = config.one_shot.sequences if config.one_shot else 0
        chunks = min(seats + visiting, config.max_num_batched_tokens)
        # A one-shot prompt's table may be longer than any that is kept: its scratch blocks are no sequence's own.
        blocks = -(-decoder.config.positions // pool.block_tokens) if visiting else kept
        self.buckets = Buckets(seats, chunks, config.max_num_batched_tokens, blocks)
        self.resident = Resident(seats, chunks, blocks, self.device)
        self.steps: dict[StepShape, StaticStep] = {}
        self._graphs, self._settled = 0, False
        self._memory = torch.cuda.graph_pool_handle() if graphs and not self._on_host else None
        self._changes = self.seats.changes
        self._wishes = Wishes(())

    def launch(self, batch: Batch) -> Pending:
        """One step, as its batch says: padded, sent and begun. What it returns waits for it."""
        with torch.inference_mode():
            return self._launch(batch)

    def _launch(self, batch: Batch) -> Pending:
        seats = self.seats
        seats.advance(batch)
        if self._changes != seats.changes:
            self._changes, self._wishes = seats.changes, Wishes(seats.generations)
            self.resident.seat(seats)
        drawing = [c.sequence if c.last and wants_token(c.sequence) else None for c in batch.chunks]
        wishes = Wishes([generation_of(each) for each in drawing if each is not None])
        step = self._step(self._shape(batch, self._wishes.greedy and wishes.greedy))
        into = step.stage()
        self._stage_decodes(into)
        if batch.chunks:
            self._stage_chunks(into, batch, step.shape)
        if not step.shape.closed:
            self._stage_wishes(into, step.shape.decodes, drawing, wishes)
        result = step.run()
        self.resident.note(seats.members, drawing)
        return self._pending(step, result, batch, drawing, wishes)

    def renewed(self, pool: BlockPool) -> GraphExecutor:
        """This executor, for another pool of the same size with nothing in it: what was captured serves again."""
        assert pool.blocks == self.pool.blocks, "the cache has its size"
        if not self._on_host:
            torch.cuda.synchronize(self.device)  # steps that nobody waited for may still be on their way
        self.pool, self.seats = pool, Seats(*self.seats.tables.shape, pool)
        self._changes, self._wishes = self.seats.changes, Wishes(())
        self.resident.clear()
        return self

    @torch.inference_mode()
    def warm(self, shapes: Many[StepShape]) -> None:
        """Compile and capture shapes before anybody waits for them. Nothing that is kept is written over."""
        for shape in shapes:
            step = self._step(shape)
            step.run_empty()
            if self._capture(step):
                step.run_empty()

    @torch.inference_mode()
    def settle(self) -> None:
        """Make graphs of all shapes that have been met, and none from now on: what follows is to be timed.

        Those that were met most often come first. Nobody may be here.
        """
        self._settled = True
        for step in sorted(self.steps.values(), key=lambda step: -step.runs):
            if self._capture(step):
                step.run_empty()

    def _shape(self, batch: Batch, greedy: bool) -> StepShape:
        """What the batch fits into. It is closed if the likeliest tokens are all that anybody wants."""
        seats, size = self.seats, self.pool.block_tokens
        ends = [-(-(chunk.context + chunk.tokens) // size) for chunk in batch.chunks]
        closed = greedy and not seats.asking and self.decoder.weights.head is not None
        closed = closed and not any(_looks_inside(chunk.sequence) for chunk in batch.chunks)
        blocks = max([seats.width, *ends])
        return self.buckets.shape(len(seats), len(batch.chunks), batch.prefill_tokens, blocks, closed)

    def _step(self, shape: StepShape) -> StaticStep:
        """The step of a shape; a graph if it has been met often."""
        if not shape.captured:
            return StaticStep(shape, self.decoder, self.cache, self.resident)
        step = self.steps.get(shape)
        if step is None:
            step = self.steps[shape] = StaticStep(shape, self.decoder, self.cache, self.resident)
        elif step.runs >= OFTEN and not self._settled:
            self._capture(step)
        return step

    def _capture(self, step: StaticStep) -> bool:
        """Make a graph of a step that has run, where there are graphs and not too many; whether it was made."""
        if self._memory is None or step.captured or self._graphs >= MOST_GRAPHS:
            return False
        step.capture(self._memory)
        self._graphs += 1
        return True

    # -- what goes in ------------------------------------------------------------------------------------------------

    def _stage_decodes(self, into: Arrays) -> None:
        seats, n = self.seats, len(self.seats)
        into["seats"][:n] = self.resident.seated
        into["source"][:n] = self.resident.sources(seats.members)
        for name in ("positions", "slots", "lengths"):
            into[name][:n] = getattr(seats, name)[:n]
        into["given"][:n] = seats.tokens[:n]

    def _stage_chunks(self, into: Arrays, batch: Batch, shape: StepShape) -> None:
        tables = self._tables(batch.chunks)
        needed = tables[:, : shape.blocks]  # blocks behind these are reserved for later
        into["chunk_tables"][: needed.shape[0], : needed.shape[1]] = needed
        into["picked"][: shape.decodes] = np.arange(shape.decodes)
        end = 0
        for i, chunk in enumerate(batch.chunks):
            begin, end = end, end + chunk.tokens
            rows = slice(shape.decodes + begin, shape.decodes + end)
            into["prompt"][begin:end], into["positions"][rows], into["slots"][rows] = self._chunk(chunk, tables[i])
            into["chunk_contexts"][i] = chunk.context
            into["chunk_starts"][i + 1 :] = end
            into["picked"][shape.decodes + i] = rows.stop - 1

    def _stage_wishes(self, into: Arrays, decodes: int, drawing: Drawing, wishes: Wishes) -> None:
        """How the tokens of an open step are drawn; rows that only fill up take the likeliest."""
        n, completed = len(self.seats), [i for i, each in enumerate(drawing) if each is not None]
        into["top_p"].fill(1.0)
        for known, rows in ((self._wishes, np.arange(n)), (wishes, np.array(completed, dtype=np.int64) + decodes)):
            for name, column in known.columns().items():
                into[name][rows] = column
        into["places"][:n] = self.seats.lengths[:n]
        for i in completed:
            into["places"][decodes + i] = place_after(_sure(drawing[i]))

    # -- what comes out ----------------------------------------------------------------------------------------------

    def _pending(self, step: StaticStep, result: Result, batch: Batch, drawing: Drawing, wishes: Wishes) -> Pending:
        """Ask for what the step gives, to be handed out when it is called."""
        generations, d = self.seats.generations, step.shape.decodes
        told: list[Told] = []
        states: States = []
        tokens = None if isinstance(result, Opened) else result
        first = [(d + i, sequence) for i, sequence in enumerate(drawing) if sequence is not None]
        if isinstance(result, Opened):
            told = self._prompts(batch, result.hidden[d:])
            done = [(i, chunk.sequence) for i, chunk in enumerate(batch.chunks) if chunk.last]
            states = self._states(done, result.normed[d:])
            if result.logits is not None:
                tokens, logprobs = self._draw(step, result.logits, wishes)
                told += self._told(result.logits, logprobs, first)
        coming = None if tokens is None else Coming(tokens)

        def collect() -> Produced:
            drawn: npt.NDArray[Any] = np.zeros(0) if coming is None else coming.numpy()
            given = [(sequence, int(drawn[row])) for row, sequence in first]
            return Produced(generations, drawn[: len(generations)].tolist(), given, read_states(states), told)

        return collect

    def _draw(self, step: StaticStep, logits: torch.Tensor, wishes: Wishes) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of an open step and their log-probabilities, (picked,) each."""
        greedy, filtered = self._wishes.greedy and wishes.greedy, self._wishes.filtered or wishes.filtered
        tokens, logprobs = sample(logits, step.parameters(greedy=greedy, filtered=filtered))
        self.resident.keep(tokens, step.shape.decodes)
        return tokens, logprobs

    def _told(self, logits: torch.Tensor, logprobs: torch.Tensor, first: list[tuple[int, Sequence]]) -> list[Told]:
        """Log-probabilities of tokens, for those who ask: these are waited for here."""
        given = [*enumerate(self.seats.generations), *((row, generation_of(sequence)) for row, sequence in first)]
        asking = [(row, generation) for row, generation in given if generation.top >= 0]
        if not asking:
            return []
        rows = torch.tensor([row for row, _ in asking], device=self.device)
        return of_given([generation for _, generation in asking], logits[rows], logprobs[rows])


def _looks_inside(sequence: Sequence) -> bool:
    """Whether a prompt's request wants more of a step than the likeliest token."""
    generation = generation_of(sequence)
    return not wants_token(sequence) or generation.top >= 0 or generation.prompt_top >= 0


def _sure(sequence: Sequence | None) -> Sequence:
    assert sequence is not None
    return sequence
