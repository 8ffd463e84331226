"""The arrays of a step in one buffer, on the host and on the device, so that one copy sends them all."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling.parameters import signed_seed
from live.generation import Generation
from live.graphs.capture_sizes import StepShape

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
