"""The tail of a compensated product that is split over tensor-parallel ranks, up to the next layer's input."""

from __future__ import annotations

import torch

from kernels.ec_tail import reference
from kernels.error_compensator.factors import Compensator


def ec_tail(
    outputs: torch.Tensor,
    latents: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    compensator: Compensator,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.ec_tail`, on CUDA by one kernel (`triton.ec_tail_of_peers` for buffers on several GPUs)."""
    if outputs.is_cuda:
        from kernels.ec_tail import triton

        return triton.ec_tail(
            outputs.contiguous(), latents.contiguous(), residual.contiguous(), weight, compensator, epsilon
        )
    return reference.ec_tail(outputs, latents, residual, weight, compensator, epsilon)
