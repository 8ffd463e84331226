"""Benchmark cases of the tail: ranks' staging buffers on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.ec_tail import ec_tail
from kernels.error_compensator.cases import random_layer
from kernels.microbenchmark import Case
from kernels.shapes import Shape


def cases(
    shape: Shape, device: str, dtype: torch.dtype, tokens: Sequence[int], ranks: int = 4, rank: int = 32
) -> Iterator[Case]:
    """At each number of tokens; `rank` is the compensator's, a power of two."""
    for count in tokens:
        rows = (ranks + 3) * count * shape.hidden * dtype.itemsize
        num_bytes = rows + ranks * count * rank * 4 + shape.hidden * (rank + 4) + 16 * rank * rank
        yield Case(
            operation="ec_tail",
            sizes={"tokens": count, "hidden": shape.hidden, "ranks": ranks, "rank": rank},
            prepare=partial(_prepare, shape, count, ranks, rank, device, dtype),
            moved=num_bytes,
            flops=count * (shape.hidden * (2 * rank + ranks + 5) + 16 * rank * rank),
        )


def _prepare(shape: Shape, tokens: int, ranks: int, rank: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    _, compensator = random_layer(shape.hidden, 128, rank, 0, device)
    outputs = torch.randn(ranks, tokens, shape.hidden, device=device, dtype=dtype)
    latents = torch.randn(ranks, tokens, compensator.rank, device=device)
    residual = torch.randn(tokens, shape.hidden, device=device, dtype=dtype)
    weight = torch.ones(shape.hidden, device=device, dtype=dtype)
    return lambda: ec_tail(outputs, latents, residual, weight, compensator, shape.epsilon)
