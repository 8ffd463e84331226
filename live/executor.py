"""Runs a batch for real: index tensors, the forward pass, and the next token of whoever is due one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import Parameters, sample
from live.block_pool import BlockPool
from live.coming import Coming
from live.generation import Generation
from live.likelihood import Told, of_given, of_prompt
from live.models.decoder import Decoder, Inputs, PagedCache
from live.seats import Ints, Seats, generation_of
from schedulers.batches import Batch, Chunk
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence


class Produced(NamedTuple):
    """What a step gave.

    Attributes:
        decodes, tokens: those who decode, and the token of each.
        first_tokens: the prompts that the step completed, each with its next token.
        states: of prompts that asked for no token, what their last one comes to (`Generation.pooled`), by sequence.
        told: log-probabilities, of those who asked for them.
    """

    decodes: list[Generation]
    tokens: list[int]
    first_tokens: list[tuple[Sequence, int]]
    states: dict[Sequence, npt.NDArray[np.float32]]
    told: list[Told]


States: TypeAlias = list[tuple[list[tuple[int, Sequence]], Coming]]
"""Rows on their way from the device: which of them are wanted, and whose they are."""

Pending: TypeAlias = Callable[[], Produced]
"""Of a step that has been launched: called, it waits for what the step gives."""


class Executor:
    """One model on one device. Steps are launched in the order in which the scheduler began them.

    Attributes:
        decoder, cache: the model, and keys and values: of `pool`'s blocks, then of scratch blocks, where one-shot work
            has its own while it runs, and which nobody holds. seats: who decodes, as arrays.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> None:
        self.decoder, self.pool = decoder, pool
        longest = -(-decoder.config.positions // pool.block_tokens)
        self.seats = Seats(config.max_num_seqs, min(longest, pool.blocks), pool)
        self.device = decoder.weights.norm.device
        self._on_host = self.device.type == "cpu"
        blocks = pool.blocks + scratch_blocks(config)
        dtype = decoder.weights.norm.dtype
        self._known: tuple[int, Parameters] | None = None
        self._standing: tuple[tuple[int, int], Inputs] | None = None
        self.cache = PagedCache.allocate(decoder.config, blocks, pool.block_tokens, dtype, str(self.device))

    def settle(self) -> None:
        """Get done what would otherwise come in the middle of the work: what follows is to be timed. Here, nothing."""

    def launch(self, batch: Batch) -> Pending:
        """One step, as its batch says. Here it has run when this returns."""
        with torch.inference_mode():  # as a decorator it costs 5 µs a step, and so 2.5
            hidden = self.decoder.forward(self._inputs(batch), self.cache)
            produced = self._mixed(batch, hidden) if batch.chunks else self._decoded(hidden)
        return lambda: produced

    def _decoded(self, hidden: torch.Tensor) -> Produced:
        """A token for each decode."""
        seats = self.seats
        logits = self.decoder.logits(self.decoder.normed(hidden))
        drawn, logprobs = sample(logits, self._decode_parameters())
        tokens = self._noted(drawn)
        told = of_given(seats.generations, logits, logprobs) if seats.asking else []
        return Produced(seats.generations, tokens, [], {}, told)

    def _mixed(self, batch: Batch, hidden: torch.Tensor) -> Produced:
        """What is drawn of a step with prompts: a token for each decode and for prompts that are done and want one."""
        seats, seated = self.seats, len(self.seats)
        told = self._prompts(batch, hidden[seated:])
        done = self._completed(batch)
        rows = [*range(seated), *(row for row, _ in done)]
        if not rows:
            return Produced([], [], [], {}, told)
        normed = self.decoder.normed(hidden[torch.tensor(rows, device=self.device)])
        states = read_states(self._states([(i, each) for i, (_, each) in enumerate(done)], normed[seated:]))
        drawing = [i for i, (_, sequence) in enumerate(done) if wants_token(sequence)]
        sequences = [done[i][1] for i in drawing]
        if not (seated or sequences):
            return Produced([], [], [], states, told)
        if len(drawing) < len(done):
            normed = normed[[*range(seated), *(seated + i for i in drawing)]]
        generations = [*seats.generations, *map(generation_of, sequences)]
        logits = self.decoder.logits(normed)
        places = [*seats.lengths[:seated].tolist(), *(place_after(each) for each in sequences)]
        drawn, logprobs = sample(logits, self._parameters(generations, places))
        tokens = self._noted(drawn)
        first = list(zip(sequences, tokens[seated:], strict=True))
        seats.first = dict(first)
        told += of_given(generations, logits, logprobs)
        return Produced(seats.generations, tokens[:seated], first, states, told)

    def _noted(self, drawn: torch.Tensor) -> list[int]:
        """Tokens as numbers; those of the seated go into the next step. `drawn`: theirs first, (rows,)."""
        tokens: Ints = (drawn if self._on_host else drawn.cpu()).numpy()
        seated = len(self.seats)
        self.seats.tokens[:seated] = tokens[:seated]
        return cast(list[int], tokens.tolist())

    def _inputs(self, batch: Batch) -> Inputs:
        seats = self.seats
        seats.advance(batch)
        if batch.chunks:
            return self._with_chunks(batch.chunks)
        alike = seats.changes, seats.width
        if self._standing is None or self._standing[0] != alike or not self._on_host:
            self._standing = alike, self._with_chunks(())
        return self._standing[1]  # on the host its tensors are the arrays, which `advance` has changed

    def _with_chunks(self, chunks: Many[Chunk]) -> Inputs:
        seats, n = self.seats, len(self.seats)
        tables = self._tables(chunks)
        parts = [self._chunk(chunk, table) for chunk, table in zip(chunks, tables, strict=True)]
        rows = [(seats.tokens[:n], seats.positions[:n], seats.slots[:n]), *parts]
        tokens, positions, slots = (np.concatenate(each) for each in zip(*rows, strict=True)) if chunks else rows[0]
        return Inputs(
            tokens=self._send(tokens),
            positions=self._send(positions),
            slots=self._send(slots),
            decode_tables=self._send(seats.tables[:n, : seats.width]),
            decode_lengths=self._send(seats.lengths[:n]),
            chunk_tables=self._send(tables),
            chunk_starts=self._send(np.cumsum([0, *(chunk.tokens for chunk in chunks)], dtype=np.int32)),
            chunk_contexts=self._send(np.array([chunk.context for chunk in chunks], dtype=np.int32)),
        )

    def _chunk(self, chunk: Chunk, table: npt.NDArray[np.int32]) -> tuple[Ints, Ints, Ints]:
        """Tokens, positions and slots of a prompt chunk."""
        end, size = chunk.context + chunk.tokens, self.pool.block_tokens
        positions = np.arange(chunk.context, end)
        slots = table[positions // size].astype(np.int64) * size + positions % size
        return generation_of(chunk.sequence).tokens(chunk.context, end), positions, slots

    def _tables(self, chunks: Many[Chunk]) -> npt.NDArray[np.int32]:
        """(chunks, blocks): what each holds, and scratch blocks for the rest of a one-shot prompt."""
        scratch, lists = self.pool.blocks, []
        for chunk in chunks:
            blocks = self.pool.table(chunk.sequence.holding)
            lacking = -(-(chunk.context + chunk.tokens) // self.pool.block_tokens) - len(blocks)
            if lacking > 0:
                blocks = [*blocks, *range(scratch, scratch + lacking)]
                scratch += lacking
            lists.append(blocks)
        tables = np.zeros((len(lists), max(map(len, lists), default=0)), dtype=np.int32)
        for i, blocks in enumerate(lists):
            tables[i, : len(blocks)] = blocks
        return tables

    def _completed(self, batch: Batch) -> list[tuple[int, Sequence]]:
        """The last rows of prompts that are done, and whose they are."""
        done = []
        end = len(batch.decodes)
        for chunk in batch.chunks:
            end += chunk.tokens
            if chunk.last:
                done.append((end - 1, chunk.sequence))
        return done

    def _states(self, done: Many[tuple[int, Sequence]], normed: torch.Tensor) -> States:
        """What `Generation.pooled` becomes of prompts that want no token; `done`: rows of `normed`, and whose."""
        found: States = []
        for labelled in (False, True):
            asked = [(row, each) for row, each in done if not wants_token(each) and self._labelled(each) is labelled]
            if asked:
                pooled = self.decoder.labels(normed) if labelled else normed
                found.append((asked, Coming(pooled.float())))
        return found

    def _labelled(self, sequence: Sequence) -> bool:
        """Whether a request is answered by the classification head."""
        return bool(self.decoder.config.labels) and sequence.request.task in ("classify", "score", "rerank")

    def _prompts(self, batch: Batch, hidden: torch.Tensor) -> list[Told]:
        """Log-probabilities of prompt tokens, for those who ask. `hidden`: rows of the chunks."""
        told, row = [], 0
        for chunk in batch.chunks:
            generation = generation_of(chunk.sequence)
            if generation.prompt_top >= 0:
                told.append(of_prompt(self.decoder, hidden[row : row + chunk.tokens], generation, chunk.context))
            row += chunk.tokens
        return told

    def _parameters(self, generations: Many[Generation], places: Many[int]) -> Parameters:
        return Parameters.of([each.wish for each in generations], places, self.device)

    def _decode_parameters(self) -> Parameters:
        """Of those who sit: made anew when they change, and otherwise one place further."""
        seats = self.seats
        if self._known is None or self._known[0] != seats.changes:
            places = seats.lengths[: len(seats)].tolist()
            self._known = (seats.changes, self._parameters(seats.generations, places))
        elif not self._known[1].greedy:  # a greedy token does not ask for its place
            self._known[1].positions.copy_(torch.from_numpy(seats.lengths[: len(seats)]))
        return self._known[1]

    def _send(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_host else tensor.to(self.device)


def scratch_blocks(config: EngineConfig) -> int:
    """Blocks that one-shot prompts of a single step may need and not hold."""
    budget = config.one_shot
    if budget is None:
        return 0
    tokens = min(budget.most_tokens(), config.max_num_batched_tokens)
    return -(-tokens // config.block_tokens) + min(budget.sequences, tokens)


def read_states(coming: States) -> dict[Sequence, npt.NDArray[np.float32]]:
    """`Produced.states`; waits for them."""
    found: dict[Sequence, npt.NDArray[np.float32]] = {}
    for asked, rows in coming:
        found |= {sequence: rows.numpy()[row] for row, sequence in asked}
    return found


def place_after(sequence: Sequence) -> int:
    """The position of the token that follows on a prompt that has just been computed.

    The scheduler's number: how many tokens have come by now is not known while a step is under way.
    """
    return sequence.goal


def wants_token(sequence: Sequence) -> bool:
    """Whether its output is a token, and not the state that one would be drawn from."""
    return sequence.request.task == "generate"
