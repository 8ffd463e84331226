"""Buffers of steps: the arrays of one, which one copy sends to the device, and what stays there from step to step.

Block tables of the decoding sequences and sampled tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import SamplingMetadata, SamplingParams
from kernels.sampling.parameters import signed_seed
from live.device import to_device
from live.generation import Generation
from live.graphs.capture_sizes import StepShape
from live.input_batch import InputBatch, Ints
from schedulers.sequence import Sequence

Fields: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Tensors: TypeAlias = dict[str, torch.Tensor]

ALIGNMENT = 16
"""Bytes. Triton loads this many at once from arrays whose addresses are known to be multiples."""


def fields(shape: StepShape) -> Fields:
    """Type and shape of each array.

    table_rows: each decode's row of `DeviceBuffers.tables`. table_columns, table_blocks: where in it, and which block,
    holds its token. token_sources: where in `DeviceBuffers.sampled` its input token is. tokens: the input tokens that
    the host knows, 0 for others. positions, slots, lengths, chunk_*: as in `Inputs`.
    logits_indices: rows that tokens are sampled from, the decodes and the last row of each chunk. next_positions:
    positions of these tokens. All others are as in `SamplingMetadata`.
    """
    d, c, n = shape.decodes, shape.chunks, shape.tokens
    int64, int32, float32 = torch.int64, torch.int32, torch.float32
    result: Fields = {
        "table_rows": (int64, (d,)),
        "table_columns": (int64, (d,)),
        "table_blocks": (int32, (d,)),
        "token_sources": (int64, (d,)),
        "tokens": (int64, (d + n,)),
        "positions": (int64, (d + n,)),
        "slots": (int64, (d + n,)),
        "logits_indices": (int64, (d + c,)),
        "lengths": (int32, (d,)),
        "chunk_starts": (int32, (c + 1,)),
        "chunk_contexts": (int32, (c,)),
        "chunk_tables": (int32, (c, shape.blocks)),
    }
    if not shape.greedy_only:
        result |= {name: (int64, (d + c,)) for name in ("next_positions", "seeds")}
        result |= {"top_k": (int32, (d + c,))}
        result |= {name: (float32, (d + c,)) for name in ("temperature", "top_p", "min_p")}
    return result


def size(arrays: Fields) -> int:
    """Bytes of all arrays together."""
    return sum(_padded(dtype, extent) for dtype, extent in arrays.values())


def views(arrays: Fields, memory: torch.Tensor) -> Tensors:
    """The arrays as views of one buffer, (size,) uint8."""
    result, begin = {}, 0
    for name, (dtype, extent) in arrays.items():
        end = begin + int(np.prod(extent)) * dtype.itemsize
        result[name] = memory[begin:end].view(dtype).view(extent)
        begin += _padded(dtype, extent)
    return result


def _padded(dtype: torch.dtype, extent: tuple[int, ...]) -> int:
    return -(-int(np.prod(extent)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class SamplingBatch:
    """The sampling parameters of several generations, one row each, made once for as long as the rows are the same.

    Attributes:
        greedy: every row takes the most likely token. filtered: some row excludes tokens.
    """

    def __init__(self, generations: Many[Generation]) -> None:
        rows = [generation.sampling_params for generation in generations]
        self.greedy = all(row.temperature == 0 for row in rows)
        self.filtered = any(row.filters for row in rows)
        self._rows = rows
        self._columns: Arrays = {}

    def columns(self) -> Arrays:
        """The fields of `SamplingMetadata` but for the positions; made on the first call."""
        rows = self._rows
        if not self._columns:
            self._columns = {
                "temperature": np.array([row.temperature for row in rows]),
                "top_p": np.array([row.top_p for row in rows]),
                "min_p": np.array([row.min_p for row in rows]),
                "top_k": np.array([row.top_k for row in rows]),
                "seeds": np.array([signed_seed(row.seed) for row in rows], dtype=np.int64),
            }
        return self._columns


class DeviceBuffers:
    """Block tables and sampled tokens of one engine on its device, with the host's record of which row is whose.

    Attributes:
        tables: (rows + 1, blocks) int32, block ids. The last row belongs to no sequence: padding rows read it.
        sampled: (rows + chunks + 1,) int64, the tokens of the latest step: of its decodes first, and from index `rows`
            on of its chunks. The last is always 0.
        no_token: index in `sampled` of the 0.
        latest: sequences of the step launched last: its decodes, and by chunk the sequence it completes.
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
        self.latest: tuple[tuple[Sequence, ...], Many[Sequence | None]] = (), ()

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
        decoded, completed = self.latest
        if sequences == decoded:
            return np.arange(len(sequences))
        index = {sequence: row for row, sequence in enumerate(decoded)}
        index |= {sequence: self.rows + i for i, sequence in enumerate(completed) if sequence is not None}
        return np.array([index.get(sequence, self.no_token) for sequence in sequences], dtype=np.int64)

    def keep(self, tokens: torch.Tensor, decodes: int) -> None:
        """Store a step's tokens: of its (padded) decodes, then of its chunks."""
        self.sampled[:decodes].copy_(tokens[:decodes])
        self.sampled[self.rows : self.rows + len(tokens) - decodes].copy_(tokens[decodes:])
