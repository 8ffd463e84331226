"""Index arrays of everybody who decodes, kept from step to step: a step changes a few numbers in place.

Building them anew from lists is most of what a step costs the host in engines that do (the project's notes: 645
microseconds at batch 256).
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
        tokens: the token that goes into the next step. lengths: cached tokens, with those of the step being prepared.
        tables: (seats, blocks) int32, block ids. members, rows: who sat in the latest step, and where.
        generations: of the members. asking: whether any of them wants log-probabilities.
        changes: how often members have changed.
    """

    def __init__(self, seats: int, blocks: int, pool: BlockPool) -> None:
        self.pool = pool
        self.tokens = np.zeros(seats, dtype=np.int64)
        self.lengths = np.zeros(seats, dtype=np.int64)
        self.tables = np.zeros((seats, blocks), dtype=np.int32)
        self.members: tuple[Sequence, ...] = ()
        self.rows: Ints = np.zeros(0, dtype=np.int64)
        self.generations: list[Generation] = []
        self.asking = False
        self.changes = 0
        self._row: dict[Sequence, int] = {}
        self._free = list(range(seats - 1, -1, -1))

    def advance(self, batch: Batch) -> tuple[Ints, Ints]:
        """Seat the decodes of a step, and make room for a token more of each: its positions and slots."""
        members = tuple(batch.decodes)
        if members != self.members:
            self._seat(members, batch.tick)
        rows, size = self.rows, self.pool.block_tokens
        positions = self.lengths[rows]
        self.lengths[rows] = positions + 1
        blocks, offsets = np.divmod(positions, size)
        for i in np.flatnonzero(offsets == 0).tolist():
            self._give(members[i], int(rows[i]), int(blocks[i]))
        return positions, self.tables[rows, blocks].astype(np.int64) * size + offsets

    def widest(self) -> int:
        """Blocks that the longest of those seated has."""
        return -(-int(self.lengths[self.rows].max()) // self.pool.block_tokens) if len(self.rows) else 0

    def _seat(self, members: tuple[Sequence, ...], tick: int) -> None:
        staying = set(members)
        for sequence in self.members:
            if sequence not in staying:
                self._free.append(self._row.pop(sequence))
        for sequence in members:
            if sequence not in self._row:
                self._enter(sequence, tick)
        self.members = members
        self.generations = [generation_of(sequence) for sequence in members]
        self.asking = any(generation.top >= 0 for generation in self.generations)
        self.changes += 1
        self.rows = np.array([self._row[sequence] for sequence in members], dtype=np.int64)

    def _enter(self, sequence: Sequence, tick: int) -> None:
        row = self._row[sequence] = self._free.pop()
        table = self.pool.table(sequence.holding)
        self.tables[row, : len(table)] = table
        self.lengths[row] = sequence.offset + tick - 1
        self.tokens[row] = generation_of(sequence).output[-1]

    def _give(self, sequence: Sequence, row: int, block: int) -> None:
        """The block that a sequence's next token starts, if it was not its own before (`reserve: answer`)."""
        table = self.pool.table(sequence.holding)
        if block == len(table):
            self.tables[row, block] = self.pool.give(sequence.holding)


def generation_of(sequence: Sequence) -> Generation:
    """What the engine has hung on a sequence."""
    generation = sequence.payload
    assert isinstance(generation, Generation)
    return generation
