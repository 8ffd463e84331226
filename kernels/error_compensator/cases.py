"""Layers with random weights, for measurements and tests."""

from __future__ import annotations

import torch

from kernels.error_compensator import Compensator, compensator
from kernels.w4_gemm import PackedWeight, quantise


def random_layer(
    outputs: int, inputs: int, rank: int, group: int, device: str, bits: int = 4
) -> tuple[PackedWeight, Compensator]:
    """A layer with random weights and a random compensator."""
    weight = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    return quantise(weight, bits, group), random_compensator(outputs, inputs, rank, device)


def random_compensator(outputs: int, inputs: int, rank: int, device: str) -> Compensator:
    """A compensator with random weights: the gate's arguments are of order 1, and so is its correction."""

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*size, device=device)

    return compensator(
        normal(rank, inputs, scale=inputs**-0.5),
        normal(outputs, rank, scale=rank**-0.5),
        normal(4 * rank, rank, scale=rank**-0.5),
        normal(4 * rank),
        normal(rank, 4 * rank, scale=0.5 * rank**-0.5),
        normal(rank),
    )
