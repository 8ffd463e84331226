"""The mathematics of the product with a weight of 3 or 4 bits."""

from __future__ import annotations

import torch

from kernels.w4_gemm.pack import PackedWeight, dequantise


def w4_gemm(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """y = x · Ŵᵀ, (..., inputs) to (..., outputs) in x's type; Ŵ and the sums in float32, or wider if x is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), dequantise(weight, wide)).to(x.dtype)
