"""The arrays of a step in one buffer, on the host and on the device, so that one copy sends them all."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

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
