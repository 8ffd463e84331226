"""The mathematics of the compensated product (SPEAR, eq. 3)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kernels.error_compensator.factors import Compensator
from kernels.w4_gemm.pack import PackedWeight, dequantise


def compensated_gemm(x: torch.Tensor, weight: PackedWeight, compensator: Compensator) -> torch.Tensor:
    """y = Ŵx + α · B(γ(Ax) ⊙ Ax), (..., inputs) to (..., outputs) in x's type.

    Everything is computed in float32, or wider if x is, and rounded once at the end.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    base = linear(x.to(wide), dequantise(weight, wide))
    return (base + correction(project(x.to(wide), compensator), compensator)).to(x.dtype)


def stage(
    x: torch.Tensor, weight: PackedWeight, compensator: Compensator, outputs: torch.Tensor, latents: torch.Tensor
) -> None:
    """One tensor-parallel rank's parts of a row-parallel product and of Ax, for `ec_tail` to sum (SPEAR, section 4.2).

    Args:
        x: (tokens, inputs), the rank's own inputs; weight and compensator.down likewise.
        outputs: (tokens, outputs), of any floating type; latents: (tokens, rank) float32: staging buffers, written.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    outputs.copy_(linear(x.to(wide), dequantise(weight, wide)))
    latents.copy_(project(x.to(wide), compensator))


def project(x: torch.Tensor, compensator: Compensator) -> torch.Tensor:
    """Ax, (..., rank), in x's type."""
    return linear(x, compensator.down.to(x.dtype) * compensator.down_scales.to(x.dtype).unsqueeze(1))


def gate(z: torch.Tensor, compensator: Compensator) -> torch.Tensor:
    """γ(z) = 1 + tanh(W₂ ReLU(W₁ z + b₁) + b₂), (..., rank)."""
    first, first_bias, second, second_bias = (
        part.to(z.dtype)
        for part in (compensator.first, compensator.first_bias, compensator.second, compensator.second_bias)
    )
    return 1 + torch.tanh(linear(linear(z, first, first_bias).relu(), second, second_bias))


def correction(z: torch.Tensor, compensator: Compensator) -> torch.Tensor:
    """α · B(γ(z) ⊙ z), (..., outputs), of z = Ax summed over all inputs."""
    up = compensator.up.to(z.dtype) * compensator.up_scales.to(z.dtype).unsqueeze(1)
    return compensator.alpha * linear(gate(z, compensator) * z, up[: compensator.outputs])
