"""Runs a batch for real: index tensors, the forward pass, and the next token of whoever is due one."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import Parameters, sample
from live.block_pool import BlockPool
from live.generation import Generation
from live.models.decoder import Decoder, Inputs, PagedCache
from live.seats import Ints, Seats
from schedulers.batches import Batch, Chunk
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence


@dataclass(frozen=True)
class Produced:
    """What a step gave. `tokens` and `logprobs` follow `sequences`: its decodes, then the prompts that it completed.

    `states`: by sequence, the normed hidden state of the last token of a prompt that asked for nothing else.
    """

    sequences: list[Sequence]
    tokens: list[int]
    logprobs: list[float]
    states: dict[Sequence, npt.NDArray[np.float32]]


class Executor:
    """One model on one device.

    Attributes:
        decoder, cache: the model, and keys and values: of `pool`'s blocks, then of scratch blocks, where one-shot work
            has its own while it runs, and which nobody holds. seats: who decodes, as arrays.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> None:
        self.decoder, self.pool = decoder, pool
        longest = -(-decoder.config.positions // pool.block_tokens)
        self.seats = Seats(config.max_num_seqs, min(longest, pool.blocks), pool)
        self.device = decoder.weights.norm.device
        blocks = pool.blocks + scratch_blocks(config)
        dtype = decoder.weights.norm.dtype
        self.cache = PagedCache.allocate(decoder.config, blocks, pool.block_tokens, dtype, str(self.device))

    @torch.inference_mode()
    def run(self, batch: Batch) -> Produced:
        """One step, as its batch says. Returns when the tokens are known on the host."""
        inputs = self._inputs(batch)
        hidden = self.decoder.forward(inputs, self.cache)
        due = self._due(batch)
        if not due:
            return Produced([], [], [], {})
        drawing = [i for i, (_, sequence) in enumerate(due) if wants_token(sequence)]
        rows = torch.tensor([row for row, _ in due], device=self.device)
        normed = self.decoder.normed(hidden[rows] if len(due) < len(hidden) else hidden)
        states = self._states(due, drawing, normed)
        sequences = [due[i][1] for i in drawing]
        if not sequences:
            return Produced([], [], [], states)
        logits = self.decoder.logits(normed if len(drawing) == len(due) else normed[drawing])
        tokens, logprobs = sample(logits, self._parameters(sequences))
        produced = Produced(sequences, tokens.tolist(), logprobs.tolist(), states)
        seated = len(batch.decodes)
        self.seats.tokens[self.seats.rows] = produced.tokens[:seated]
        return produced

    def _inputs(self, batch: Batch) -> Inputs:
        seats = self.seats
        positions, slots = seats.advance(batch)
        tokens = seats.tokens[seats.rows]
        tables = self._tables(batch.chunks)
        chunks = [self._chunk(chunk, table) for chunk, table in zip(batch.chunks, tables, strict=True)]
        if chunks:
            tokens = np.concatenate((tokens, *(part[0] for part in chunks)))
            positions = np.concatenate((positions, *(part[1] for part in chunks)))
            slots = np.concatenate((slots, *(part[2] for part in chunks)))
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        starts[1:] = np.cumsum([chunk.tokens for chunk in batch.chunks])
        return Inputs(
            tokens=self._send(tokens),
            positions=self._send(positions),
            slots=self._send(slots),
            decode_tables=self._send(seats.tables[seats.rows, : seats.widest()]),
            decode_lengths=self._send(seats.lengths[seats.rows].astype(np.int32)),
            chunk_tables=self._send(tables),
            chunk_starts=self._send(starts),
            chunk_contexts=self._send(np.array([chunk.context for chunk in batch.chunks], dtype=np.int32)),
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

    def _due(self, batch: Batch) -> list[tuple[int, Sequence]]:
        """Rows whose output matters, and whose they are: every decode, and the last row of a prompt that is done."""
        due = list(enumerate(batch.decodes))
        end = len(due)
        for chunk in batch.chunks:
            end += chunk.tokens
            if chunk.last:
                due.append((end - 1, chunk.sequence))
        return due

    def _states(
        self, due: list[tuple[int, Sequence]], drawing: list[int], normed: torch.Tensor
    ) -> dict[Sequence, npt.NDArray[np.float32]]:
        if len(drawing) == len(due):
            return {}
        asked = sorted(set(range(len(due))) - set(drawing))
        found: npt.NDArray[np.float32] = normed[asked].float().cpu().numpy()
        return {due[i][1]: found[j] for j, i in enumerate(asked)}

    def _parameters(self, sequences: list[Sequence]) -> Parameters:
        generations = [generation_of(sequence) for sequence in sequences]
        places = [len(each.prompt) + len(each.output) for each in generations]
        return Parameters.of([each.wish for each in generations], places, self.device)

    def _send(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def scratch_blocks(config: EngineConfig) -> int:
    """Blocks that one-shot prompts of a single step may need and not hold."""
    budget = config.one_shot
    if budget is None:
        return 0
    tokens = min(budget.most_tokens(), config.max_num_batched_tokens)
    return -(-tokens // config.block_tokens) + min(budget.sequences, tokens)


def generation_of(sequence: Sequence) -> Generation:
    """What the engine has hung on a sequence."""
    generation = sequence.payload
    assert isinstance(generation, Generation)
    return generation


def wants_token(sequence: Sequence) -> bool:
    """Whether its output is a token, and not the state that one would be drawn from."""
    return sequence.request.task == "generate"
