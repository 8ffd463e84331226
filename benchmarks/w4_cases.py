"""Benchmark cases of products with weights of 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.microbenchmark import Case
from kernels.shapes import Shape
from kernels.w4_gemm import quantise, w4_gemm
from kernels.w4_gemm.pack import GROUP


def cases(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    tokens: Sequence[int],
    bits: int = 4,
    group: int = GROUP,
) -> Iterator[Case]:
    """Each linear layer of a decoder layer, at each number of tokens."""
    for layer, (outputs, inputs) in shape.linear().items():
        packed = outputs * inputs * bits // 8 + (outputs * inputs // group if group else outputs) * 2
        for count in tokens:
            activations = count * (outputs + inputs) * dtype.itemsize
            yield Case(
                operation=f"w4_gemm/{layer}",
                sizes={"tokens": count, "outputs": outputs, "inputs": inputs, "bits": bits, "group": group},
                prepare=partial(_prepare, count, outputs, inputs, bits, group, device, dtype),
                moved=packed + activations,
                flops=2 * count * outputs * inputs,
            )


def _prepare(
    tokens: int, outputs: int, inputs: int, bits: int, group: int, device: str, dtype: torch.dtype
) -> Callable[[], object]:
    weight = quantise(torch.randn(outputs, inputs, device=device) * inputs**-0.5, bits, group)
    x = torch.randn(tokens, inputs, device=device, dtype=dtype)
    return lambda: w4_gemm(x, weight)
