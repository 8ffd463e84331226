"""SiLU(gate) · up, the activation between the two projections of a gated feed-forward layer."""

from __future__ import annotations

import torch

from kernels.silu_mul import reference


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """Compute `reference.silu_mul`, on CUDA by one kernel."""
    if packed.is_cuda:
        from kernels.silu_mul import triton

        return triton.silu_mul(packed.contiguous())
    return reference.silu_mul(packed)
