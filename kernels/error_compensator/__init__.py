"""Products with packed weights, and a small input-dependent term that compensates their rounding errors (SPEAR)."""

from __future__ import annotations

import torch

from kernels.error_compensator import reference
from kernels.error_compensator.factors import Compensator, compensator, from_int8, to_int8
from kernels.w4_gemm.pack import PackedWeight

__all__ = ["Compensator", "compensated_gemm", "compensator", "from_int8", "to_int8"]


def compensated_gemm(x: torch.Tensor, weight: PackedWeight, compensator: Compensator) -> torch.Tensor:
    """Compute `reference.compensated_gemm`, on CUDA in one launch for few tokens and in two streams for many."""
    if x.is_cuda:
        from kernels.error_compensator import triton

        return triton.compensated_gemm(x.contiguous(), weight, compensator)
    return reference.compensated_gemm(x, weight, compensator)
