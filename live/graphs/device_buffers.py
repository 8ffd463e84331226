"""Buffers that stay on the device from step to step: block tables of the decoding sequences, and sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from kernels.sampling import SamplingMetadata, SamplingParams
from live.device import to_device
from live.input_batch import InputBatch, Ints
from schedulers.sequence import Sequence


class DeviceBuffers:
    """Block tables and sampled tokens of one engine on its device, with the host's record of which row is whose.

    Attributes:
        tables: (rows + 1, blocks) int32, block ids. The last row belongs to no sequence: padding rows read it.
        sampled: (rows + chunks + 1,) int64, the tokens of the latest step: of its decodes first, and from index `rows`
            on of its chunks. The last is always 0.
        no_token: index in `sampled` of the 0.
        decode_rows: rows of `tables`, one for each decode of the step to come.
    """

    def __init__(self, rows: int, chunks: int, blocks: int, device: torch.device) -> None:
        self.rows = rows
        self.tables = torch.zeros(rows + 1, blocks, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(rows + chunks + 1, dtype=torch.int64, device=device)
        self.no_token = rows + chunks
        self._greedy: dict[int, SamplingMetadata] = {}
        self.clear()

    def greedy_metadata(self, rows: int) -> SamplingMetadata:
        """Sampling metadata of so many greedy rows, made once: its copy to a GPU waits for the device."""
        metadata = self._greedy.get(rows)
        if metadata is None:
            params = [SamplingParams(temperature=0.0)] * rows
            metadata = self._greedy[rows] = SamplingMetadata.of(params, [0] * rows, self.sampled.device)
        return metadata

    def clear(self) -> None:
        """Free all rows and forget the sampled tokens."""
        self.decode_rows: Ints = np.zeros(0, dtype=np.int64)
        self._row_of: dict[Sequence, int] = {}
        self._free = list(range(self.rows - 1, -1, -1))
        self._latest: tuple[tuple[Sequence, ...], Many[Sequence | None]] = (), ()

    def update(self, decodes: InputBatch) -> None:
        """Free the rows of sequences that no longer decode; give new ones a row, and send their block tables."""
        sequences = decodes.sequences
        staying = set(sequences)
        for sequence in [resident for resident in self._row_of if resident not in staying]:
            self._free.append(self._row_of.pop(sequence))
        new = [i for i, sequence in enumerate(sequences) if sequence not in self._row_of]
        for i in new:
            self._row_of[sequences[i]] = self._free.pop()
        self.decode_rows = np.array([self._row_of[sequence] for sequence in sequences], dtype=np.int64)
        if new:
            device, width = self.tables.device, decodes.width
            rows, tables = (to_device(part[new], device) for part in (self.decode_rows, decodes.tables[:, :width]))
            self.tables[:, :width].index_copy_(0, rows, tables)

    def token_sources(self, sequences: tuple[Sequence, ...]) -> Ints:
        """The index in `sampled` of each decode's input token; `no_token` if the latest step did not sample it."""
        decoded, completed = self._latest
        if sequences == decoded:
            return np.arange(len(sequences))
        index = {sequence: row for row, sequence in enumerate(decoded)}
        index |= {sequence: self.rows + i for i, sequence in enumerate(completed) if sequence is not None}
        return np.array([index.get(sequence, self.no_token) for sequence in sequences], dtype=np.int64)

    def set_latest(self, decodes: tuple[Sequence, ...], completed: Many[Sequence | None]) -> None:
        """Record the sequences of the step just launched: its decodes, and by chunk the sequence it completes."""
        self._latest = decodes, completed

    def keep(self, tokens: torch.Tensor, decodes: int) -> None:
        """Store a step's tokens: of its (padded) decodes, then of its chunks."""
        self.sampled[:decodes].copy_(tokens[:decodes])
        self.sampled[self.rows : self.rows + len(tokens) - decodes].copy_(tokens[decodes:])
