"""RMSNorm, with the residual added first if there is one."""

from __future__ import annotations

import torch

from kernels.rms_norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute `reference.rms_norm`, on CUDA by one kernel."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.rms_norm(x.contiguous(), weight, epsilon)
    return reference.rms_norm(x, weight, epsilon)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.add_rms_norm`, on CUDA by one kernel."""
    if x.is_cuda:
        from kernels.rms_norm import triton

        return triton.add_rms_norm(x.contiguous(), residual.contiguous(), weight, epsilon)
    return reference.add_rms_norm(x, residual, weight, epsilon)
