"""The compensator as a chain of library calls after the product, as the baseline of the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernels.error_compensator.factors import Compensator
from kernels.w4_gemm import w4_gemm
from kernels.w4_gemm.pack import PackedWeight


@dataclass(frozen=True)
class DenseFactors:
    """The factors as library calls take them, in the activations' type; α is in `up`."""

    down: torch.Tensor
    up: torch.Tensor
    first: torch.Tensor
    first_bias: torch.Tensor
    second: torch.Tensor
    second_bias: torch.Tensor


def dense(compensator: Compensator, dtype: torch.dtype) -> DenseFactors:
    """The factors unpacked once, before the chain is timed."""
    down = compensator.down.float() * compensator.down_scales.unsqueeze(1)
    up = compensator.alpha * compensator.up.float() * compensator.up_scales.unsqueeze(1)
    parts = (
        down,
        up[: compensator.outputs],
        compensator.first,
        compensator.first_bias,
        compensator.second,
        compensator.second_bias,
    )
    return DenseFactors(*(part.to(dtype).contiguous() for part in parts))


def chain(x: torch.Tensor, weight: PackedWeight, factors: DenseFactors) -> torch.Tensor:
    """The W4 product and nine more kernels; intermediates are rounded to x's type."""
    y = w4_gemm(x, weight)
    z = linear(x, factors.down)
    inner = linear(z, factors.first, factors.first_bias).relu()
    gate = 1 + torch.tanh(linear(inner, factors.second, factors.second_bias))
    return y + linear(gate * z, factors.up)
