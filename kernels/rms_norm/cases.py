"""Benchmark cases of RMSNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.microbenchmark import Case
from kernels.rms_norm import add_rms_norm
from kernels.shapes import Shape


def cases(shape: Shape, device: str, dtype: torch.dtype, tokens: Sequence[int]) -> Iterator[Case]:
    """RMSNorm with its residual, at each number of tokens."""
    for count in tokens:
        size = count * shape.hidden * dtype.itemsize
        yield Case(
            operation="rms_norm",
            sizes={"tokens": count, "hidden": shape.hidden},
            prepare=partial(_prepare, shape, count, device, dtype),
            moved=4 * size,
            flops=5 * count * shape.hidden,
        )


def _prepare(shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    x, residual = (torch.randn(tokens, shape.hidden, device=device, dtype=dtype) for _ in range(2))
    weight = torch.ones(shape.hidden, device=device, dtype=dtype)
    return lambda: add_rms_norm(x, residual, weight, shape.epsilon)
