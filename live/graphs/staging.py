"""The arrays of a step in one piece of memory, on the host and on the device: one copy sends them all."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from live.graphs.buckets import StepShape

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Tensors: TypeAlias = dict[str, torch.Tensor]

ALIGNED = 16
"""Bytes. Kernels load so many at once where they know that an array begins at a multiple."""


def fields(shape: StepShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and size of each array.

    seats: whose row of the resident tables. source: which of the tokens drawn last goes in, −1: `given`. prompt: token
    ids of the chunks. positions, slots, lengths, chunk_*: as in `Inputs`. picked: rows whose next token is drawn, the
    decodes and the last of each chunk. places: the positions of these tokens. The rest: as in `Parameters`.
    """
    d, c, n = shape.decodes, shape.chunks, shape.tokens
    wide, narrow, real = torch.int64, torch.int32, torch.float32
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "seats": (wide, (d,)),
        "source": (wide, (d,)),
        "given": (wide, (d,)),
        "prompt": (wide, (n,)),
        "positions": (wide, (d + n,)),
        "slots": (wide, (d + n,)),
        "picked": (wide, (d + c,)),
        "lengths": (narrow, (d,)),
        "chunk_starts": (narrow, (c + 1,)),
        "chunk_contexts": (narrow, (c,)),
        "chunk_tables": (narrow, (c, shape.blocks)),
    }
    if not shape.closed:
        found |= {name: (wide, (d + c,)) for name in ("places", "seeds")}
        found |= {"top_k": (narrow, (d + c,))}
        found |= {name: (real, (d + c,)) for name in ("temperature", "top_p", "min_p")}
    return found


def size(shape: StepShape) -> int:
    """Bytes of all arrays together."""
    return sum(_padded(dtype, extent) for dtype, extent in fields(shape).values())


def views(shape: StepShape, memory: torch.Tensor) -> Tensors:
    """The arrays in a piece of memory, (size,) uint8."""
    found, begin = {}, 0
    for name, (dtype, extent) in fields(shape).items():
        end = begin + int(np.prod(extent)) * dtype.itemsize
        found[name] = memory[begin:end].view(dtype).view(extent)
        begin += _padded(dtype, extent)
    return found


def _padded(dtype: torch.dtype, extent: tuple[int, ...]) -> int:
    return -(-int(np.prod(extent)) * dtype.itemsize // ALIGNED) * ALIGNED
