"""Benchmark cases of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.expert_gemm import expert_mlp, route
from kernels.microbenchmark import Case
from kernels.shapes import Shape


def cases(shape: Shape, device: str, dtype: torch.dtype, tokens: Sequence[int]) -> Iterator[Case]:
    """Routing and experts of one layer, at each number of tokens; a uniform router, as one with random weights is.

    Bytes are those of the experts that uniform routing reaches: experts · (1 − (1 − chosen / experts)^tokens).
    """
    if not shape.experts:
        return
    experts_per_token, inner = shape.experts_per_token, shape.expert_intermediate
    weights = 3 * inner * shape.hidden
    for count in tokens:
        experts_read = shape.experts * (1 - (1 - experts_per_token / shape.experts) ** count)
        activations = count * (2 * shape.hidden + experts_per_token * 2 * (inner + shape.hidden) + shape.experts)
        yield Case(
            operation="expert_gemm",
            sizes={
                "tokens": count,
                "hidden": shape.hidden,
                "intermediate": inner,
                "experts": shape.experts,
                "chosen": experts_per_token,
            },
            prepare=partial(_prepare, shape, count, device, dtype),
            moved=round((experts_read * weights + activations) * dtype.itemsize),
            flops=2 * count * experts_per_token * weights,
            footprint=(shape.experts * weights + activations) * dtype.itemsize,
        )


def _prepare(shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype)

    inner = shape.expert_intermediate
    x, logits = normal(tokens, shape.hidden), normal(tokens, shape.experts)
    gate_up = normal(shape.experts, 2 * inner, shape.hidden).mul_(shape.hidden**-0.5)
    down = normal(shape.experts, shape.hidden, inner).mul_(inner**-0.5)

    def call() -> object:
        weights, experts = route(logits, shape.experts_per_token)
        return expert_mlp(x, weights, experts, gate_up, down)

    return call
