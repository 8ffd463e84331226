"""Benchmark cases of SiLU · up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.microbenchmark import Case
from kernels.shapes import Shape
from kernels.silu_mul import silu_mul


def cases(shape: Shape, device: str, dtype: torch.dtype, tokens: Sequence[int]) -> Iterator[Case]:
    """The activation at each number of tokens."""
    for count in tokens:
        size = count * shape.intermediate * dtype.itemsize
        yield Case(
            operation="silu_mul",
            sizes={"tokens": count, "intermediate": shape.intermediate},
            prepare=partial(_prepare, shape, count, device, dtype),
            moved=3 * size,
            flops=5 * count * shape.intermediate,
        )


def _prepare(shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    packed = torch.randn(tokens, 2 * shape.intermediate, device=device, dtype=dtype)
    return lambda: silu_mul(packed)
