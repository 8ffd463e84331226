"""Index arrays of everybody who decodes, kept from step to step: a step changes a few numbers in place.

Building them anew from lists is most of what a step costs the host in engines that do (the project's notes: 645
microseconds at batch 256). Row i is the i-th decode of the step, so that what a step needs are views of the arrays,
which stay the same objects for as long as the members do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from live.block_pool import BlockPool
from live.generation import Generation
from schedulers.batches import Batch
from schedulers.sequence import Sequence

Ints = npt.NDArray[np.int64]


class Seats:
    """A row of the arrays for each decoding sequence.

    Attributes:
        tokens, positions, slots: of the token that goes into the step: its id, its place in the sequence, and where its
            key and value go (block · block size + offset). lengths: cached tokens with it, int32.
        tables: (seats, blocks) int32, block ids. width: of its columns, those in use.
        first: the token of whoever completed a prompt with the latest step that had any: it goes into the next.
        members: who sits, by row. generations: theirs. asking: whether any of them wants log-probabilities.
        changes: how often members have changed.
    """

    def __init__(self, seats: int, blocks: int, pool: BlockPool) -> None:
        self.pool = pool
        self.tokens = np.zeros(seats, dtype=np.int64)
        self._places = np.zeros((2, seats), dtype=np.int64)
        self.positions, self.slots = self._places
        self.lengths = np.zeros(seats, dtype=np.int32)
        self.tables = np.zeros((seats, blocks), dtype=np.int32)
        self.width = 0
        self.first: dict[Sequence, int] = {}
        self.members: tuple[Sequence, ...] = ()
        self.generations: list[Generation] = []
        self.asking = False
        self.changes = 0
        self._moving = self._places[:, :0], self.lengths[:0]
        self._phase = 0
        self._starting: list[list[int]] = [[] for _ in range(pool.block_tokens)]  # rows that start a block, by phase

    def __len__(self) -> int:
        return len(self.members)

    def advance(self, batch: Batch) -> None:
        """Seat the decodes of a step, and go to the next token of each."""
        if batch.decodes != self.members:
            self._seat(tuple(batch.decodes), batch.tick)
        places, lengths = self._moving
        places += 1
        lengths += 1
        self._phase = (self._phase + 1) % self.pool.block_tokens
        for row in self._starting[self._phase]:
            self._start_block(row)

    def _start_block(self, row: int) -> None:
        """A block for a token that is the first in it: drawn for this step, or from before with `reserve: answer`."""
        block = int(self.positions[row]) // self.pool.block_tokens
        holding = self.members[row].holding
        table = self.pool.table(holding)
        found = self.tables[row, block] = table[block] if block < len(table) else self.pool.give(holding)
        self.slots[row] = found * self.pool.block_tokens
        self.width = max(self.width, block + 1)

    def _seat(self, members: tuple[Sequence, ...], tick: int) -> None:
        """Rows for a step with other members: those who stay move together, those who come are filled in."""
        before = {sequence: row for row, sequence in enumerate(self.members)}
        came = [before.get(sequence, -1) for sequence in members]
        n = len(members)
        for array in (self.tokens, self._places.T, self.lengths, self.tables[:, : self.width]):
            array[:n] = array[came]
        self.members = members
        self.generations = [generation_of(sequence) for sequence in members]
        self.asking = any(generation.top >= 0 for generation in self.generations)
        self.changes += 1
        self._moving = self._places[:, :n], self.lengths[:n]
        for row, old in enumerate(came):
            if old < 0:
                self._enter(row, tick)
        self._expect_blocks()

    def _expect_blocks(self) -> None:
        """When each row starts its next block, and how far tables are in use, as of the step before the one to come."""
        size = self.pool.block_tokens
        self._phase, self._starting = 0, [[] for _ in range(size)]
        positions = self.positions[: len(self.members)]
        for row, offset in enumerate((positions % size).tolist()):
            self._starting[-offset % size].append(row)
        self.width = int(positions.max(initial=-1)) // size + 1

    def _enter(self, row: int, tick: int) -> None:
        """As of the step before the one to come."""
        sequence, size = self.members[row], self.pool.block_tokens
        table = self.pool.table(sequence.holding)
        self.tables[row, : len(table)] = table
        cached = sequence.offset + tick - 1
        self.tokens[row] = self._last_token(sequence)
        self.lengths[row], self.positions[row] = cached, cached - 1
        block, offset = divmod(cached - 1, size)
        self.slots[row] = int(self.tables[row, block]) * size + offset

    def _last_token(self, sequence: Sequence) -> int:
        """Which may not have been handed out yet, where the plant is a step ahead; 0 where only the device knows it."""
        output = generation_of(sequence).output
        return self.first.get(sequence, output[-1] if output else 0)


def generation_of(sequence: Sequence) -> Generation:
    """What the engine has hung on a sequence."""
    generation = sequence.payload
    assert isinstance(generation, Generation)
    return generation
