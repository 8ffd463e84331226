"""Error compensators with random parts, and what rounding of their gate adds up to."""

from __future__ import annotations

import torch

from kernels.error_compensator import Compensator, compensator, reference

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative to the result; bfloat16 has a whole unit in the last place: the interpreter cuts where a GPU rounds."""


def random_compensator(outputs: int, inputs: int, rank: int, device: str, generator: torch.Generator) -> Compensator:
    """A gate whose arguments are of order 1, so that it is neither closed nor open, and a correction as large as y."""

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*size, generator=generator)).to(device)

    factors = normal(rank, inputs, scale=inputs**-0.5), normal(outputs, rank, scale=rank**-0.5)
    gate = normal(4 * rank, rank, scale=rank**-0.5), normal(4 * rank), normal(rank, 4 * rank, scale=rank**-0.5)
    return compensator(*factors, *gate, normal(rank), alpha=0.7)


def gate_error(z: torch.Tensor, compensation: Compensator) -> torch.Tensor:
    """The error of the gate's argument, whose two products see 11 bits."""
    inner = z.abs() @ compensation.first.double().abs().T + compensation.first_bias.double().abs()
    return 2**-10 * (2 * inner @ compensation.second.double().abs().T)


def latent_error(z: torch.Tensor, compensation: Compensator, rounding: float) -> torch.Tensor:
    """The error of the gated latent, which is stored with this rounding, and of its gate."""
    gated = (reference.gate(z, compensation) * z).abs()
    return gated * (rounding + 2**-22) + z.abs() * gate_error(z, compensation)


def dense_up(compensation: Compensator) -> torch.Tensor:
    """B, (outputs, rank) float64."""
    return (compensation.up.double() * compensation.up_scales.double()[:, None])[: compensation.outputs]
