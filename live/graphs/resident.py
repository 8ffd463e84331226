"""What stays on the device from step to step: block tables, a row for each who decodes, and the tokens drawn last."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from live.seats import Ints, Seats
from schedulers.sequence import Sequence


class Resident:
    """Block tables and tokens of one engine on its device, and on the host who has which row of them.

    Attributes:
        tables: (seats + 1, blocks) int32, block ids. Nobody sits in the last row: rows that only fill up read it.
        drawn: (seats + chunks,) int64, the tokens of the latest step: of its decodes by row, and from `seats` on of its
            chunks.
        seated: rows of `tables`, of those who decode in the step to come.
    """

    def __init__(self, seats: int, chunks: int, blocks: int, device: torch.device) -> None:
        self.seats = seats
        self.tables = torch.zeros(seats + 1, blocks, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(seats + chunks, dtype=torch.int64, device=device)
        self.clear()

    def clear(self) -> None:
        """Nobody sits, and nothing has been drawn."""
        self.seated: Ints = np.zeros(0, dtype=np.int64)
        self._rows: dict[Sequence, int] = {}
        self._free = list(range(self.seats - 1, -1, -1))
        self._latest: tuple[tuple[Sequence, ...], Many[Sequence | None]] = (), ()

    def seat(self, seats: Seats) -> None:
        """Whoever has left gives a row back; whoever has come gets one, with all of its blocks."""
        members = seats.members
        staying = set(members)
        for sequence in [each for each in self._rows if each not in staying]:
            self._free.append(self._rows.pop(sequence))
        came = [i for i, sequence in enumerate(members) if sequence not in self._rows]
        for i in came:
            self._rows[members[i]] = self._free.pop()
        self.seated = np.array([self._rows[sequence] for sequence in members], dtype=np.int64)
        if came:
            rows, tables = self._sent(self.seated[came]), self._sent(seats.tables[came, : seats.width])
            self.tables[:, : seats.width].index_copy_(0, rows, tables)

    def sources(self, members: tuple[Sequence, ...]) -> Ints:
        """Where in `drawn` the token of each decode is; −1: it was not drawn in the latest step."""
        decoded, completed = self._latest
        if members == decoded:
            return np.arange(len(members))
        place = {sequence: row for row, sequence in enumerate(decoded)}
        place |= {each: self.seats + i for i, each in enumerate(completed) if each is not None}
        return np.array([place.get(sequence, -1) for sequence in members], dtype=np.int64)

    def note(self, members: tuple[Sequence, ...], completed: Many[Sequence | None]) -> None:
        """Who gets the tokens of the step just launched: its decodes, and by chunk those whose prompt is complete."""
        self._latest = members, completed

    def keep(self, tokens: torch.Tensor, decodes: int) -> None:
        """Tokens of a step, of its (padded) decodes and then of its chunks."""
        self.drawn[:decodes].copy_(tokens[:decodes])
        self.drawn[self.seats : self.seats + len(tokens) - decodes].copy_(tokens[decodes:])

    def _sent(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """On the device, without waiting for what it does now."""
        tensor, device = torch.from_numpy(array), self.drawn.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
