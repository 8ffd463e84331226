"""Benchmark cases of the compensated product, fused and as a chain of library calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.error_compensator import Compensator, compensated_gemm, compensator, unfused
from kernels.microbenchmark import Case
from kernels.shapes import Shape
from kernels.w4_gemm import PackedWeight, quantise
from kernels.w4_gemm.pack import GROUP


def cases(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    tokens: Sequence[int],
    rank: int = 28,
    group: int = GROUP,
) -> Iterator[Case]:
    """Each linear layer of a decoder layer, at each number of tokens; 28 is SPEAR's rank for Llama-2-7B (Table 8)."""
    for layer, (outputs, inputs) in shape.linear().items():
        packed = outputs * inputs // 2 + (outputs * inputs // group if group else outputs) * 2
        small = rank * (outputs + inputs) + 4 * outputs + 16 * rank * rank
        for count in tokens:
            activations = count * (outputs + inputs) * dtype.itemsize
            for form in ("dispatched", "chain"):
                yield Case(
                    operation=f"error_compensator/{form}/{layer}",
                    sizes={"tokens": count, "outputs": outputs, "inputs": inputs, "rank": rank, "group": group},
                    prepare=partial(_prepare, form, count, outputs, inputs, rank, group, device, dtype),
                    moved=packed + small + activations,
                    flops=2 * count * (outputs * inputs + rank * (outputs + inputs) + 8 * rank * rank),
                )


def _prepare(
    form: str, tokens: int, outputs: int, inputs: int, rank: int, group: int, device: str, dtype: torch.dtype
) -> Callable[[], object]:
    weight, factors = random_layer(outputs, inputs, rank, group, device)
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    if form == "dispatched":
        return lambda: compensated_gemm(x, weight, factors)
    dense = unfused.dense(factors, dtype)
    return lambda: unfused.chain(x, weight, dense)


def random_layer(
    outputs: int, inputs: int, rank: int, group: int, device: str, bits: int = 4
) -> tuple[PackedWeight, Compensator]:
    """A layer with random weights: the gate's arguments are of order 1, and so is its correction."""

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*size, device=device)

    factors = compensator(
        normal(rank, inputs, scale=inputs**-0.5),
        normal(outputs, rank, scale=rank**-0.5),
        normal(4 * rank, rank, scale=rank**-0.5),
        normal(4 * rank),
        normal(rank, 4 * rank, scale=0.5 * rank**-0.5),
        normal(rank),
    )
    return quantise(normal(outputs, inputs, scale=inputs**-0.5), bits, group), factors
