"""Index arrays of the decoding sequences, kept from step to step and updated in place.

Building these arrays anew from lists in each step is most of the host's time in engines that do so (645 µs at batch
256). Here, row i belongs to the i-th decode of the step, and the inputs of a step are views of the arrays: the same
objects as long as the set of decoding sequences stays the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from live.block_pool import BlockPool
from live.generation import Generation
from schedulers.batches import Batch
from schedulers.sequence import Sequence

Ints = npt.NDArray[np.int64]


class InputBatch:
    """One row of the arrays for each decoding sequence.

    `tokens`, `positions`, `slots`: (rows,) int64, of each row's input token. `lengths`: (rows,) int32, cached tokens
    including it. `tables`: (rows, blocks) int32, of which `width` columns are in use. `first_tokens`: by sequence, of
    prompts that the last step with prompts completed. `version`: number of changes to `sequences`.
    """

    def __init__(self, rows: int, blocks: int, pool: BlockPool) -> None:
        self.pool = pool
        self.tokens = np.zeros(rows, dtype=np.int64)
        self._places = np.zeros((2, rows), dtype=np.int64)
        self.positions, self.slots = self._places
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.tables = np.zeros((rows, blocks), dtype=np.int32)
        self.width = 0
        self.first_tokens: dict[Sequence, int] = {}
        self.sequences: tuple[Sequence, ...] = ()
        self.generations: list[Generation] = []
        self.wants_logprobs = False
        self.version = 0
        self._advancing = self._places[:, :0], self.lengths[:0]
        self._phase = 0
        self._block_starts: list[list[int]] = [[] for _ in range(pool.block_size)]  # rows that start a block, by phase

    def __len__(self) -> int:
        return len(self.sequences)

    def advance(self, batch: Batch) -> None:
        """Move to the next step: its decodes, and the next token of each."""
        if batch.decodes != self.sequences:
            self._set_sequences(tuple(batch.decodes), batch.step_index)
        places, lengths = self._advancing
        places += 1
        lengths += 1
        self._phase = (self._phase + 1) % self.pool.block_size
        for row in self._block_starts[self._phase]:
            self._start_block(row)

    def _start_block(self, row: int) -> None:
        """Enter the block that the row's token starts, which was allocated in this step or at admission."""
        block = int(self.positions[row]) // self.pool.block_size
        blocks = self.sequences[row].blocks
        table = self.pool.table(blocks)
        block_id = self.tables[row, block] = table[block] if block < len(table) else self.pool.assign(blocks)
        self.slots[row] = block_id * self.pool.block_size
        self.width = max(self.width, block + 1)

    def _set_sequences(self, sequences: tuple[Sequence, ...], step_index: int) -> None:
        """Move the rows of sequences that stay, all at once, and fill the rows of new ones."""
        before = {sequence: row for row, sequence in enumerate(self.sequences)}
        old_rows = [before.get(sequence, -1) for sequence in sequences]
        n = len(sequences)
        for array in (self.tokens, self._places.T, self.lengths, self.tables[:, : self.width]):
            array[:n] = array[old_rows]
        self.sequences = sequences
        self.generations = [generation_of(sequence) for sequence in sequences]
        self.wants_logprobs = any(generation.logprobs >= 0 for generation in self.generations)
        self.version += 1
        self._advancing = self._places[:, :n], self.lengths[:n]
        for row, old in enumerate(old_rows):
            if old < 0:
                self._fill_row(row, step_index)
        self._find_block_starts()

    def _find_block_starts(self) -> None:
        """Find when each row, in the state before the next step, starts its next block, and the table's width."""
        size = self.pool.block_size
        self._phase = 0
        self._block_starts = [[] for _ in range(size)]
        positions = self.positions[: len(self.sequences)]
        for row, offset in enumerate((positions % size).tolist()):
            self._block_starts[-offset % size].append(row)
        self.width = int(positions.max(initial=-1)) // size + 1

    def _fill_row(self, row: int, step_index: int) -> None:
        """Fill the row of a new sequence, in the state of the step before the one to come."""
        sequence, size = self.sequences[row], self.pool.block_size
        table = self.pool.table(sequence.blocks)
        self.tables[row, : len(table)] = table
        cached = sequence.kv_offset + step_index - 1
        output = generation_of(sequence).output
        latest = output[-1] if output else 0  # 0 if only the device knows it yet (async scheduling)
        self.tokens[row] = self.first_tokens.get(sequence, latest)
        self.lengths[row], self.positions[row] = cached, cached - 1
        block, offset = divmod(cached - 1, size)
        self.slots[row] = int(self.tables[row, block]) * size + offset


def generation_of(sequence: Sequence) -> Generation:
    """The generation that the engine attached to a sequence."""
    generation = sequence.payload
    assert isinstance(generation, Generation)
    return generation
