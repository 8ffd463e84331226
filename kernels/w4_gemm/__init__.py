"""Products with weights of 3 or 4 bits."""

from __future__ import annotations

import torch

from kernels.w4_gemm import reference
from kernels.w4_gemm.pack import PackedWeight, dequantise, from_codes, quantise

__all__ = ["PackedWeight", "dequantise", "from_codes", "quantise", "w4_gemm"]


def w4_gemm(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Compute `reference.w4_gemm`, on CUDA by one kernel, or with Ŵ unpacked first for very many tokens."""
    if x.is_cuda:
        from kernels.w4_gemm import triton

        return triton.w4_gemm(x.contiguous(), weight)
    return reference.w4_gemm(x, weight)
