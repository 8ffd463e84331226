"""The mathematics of the tail of a compensated row-parallel product (SPEAR, section 4.2)."""

from __future__ import annotations

import torch

from kernels.error_compensator.factors import Compensator
from kernels.error_compensator.reference import correction
from kernels.rms_norm.reference import rms_norm


def ec_tail(
    outputs: torch.Tensor,
    latents: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    compensator: Compensator,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = residual + Σᵣ yᵣ + α · B(γ(z) ⊙ z) with z = Σᵣ Axᵣ, and RMSNorm of h.

    The gate is no linear function: it needs the latent summed over the ranks, not each rank's part.

    Args:
        outputs: (ranks, tokens, hidden), each rank's part of the product Ŵx. latents: (ranks, tokens, rank of the
            compensator), each rank's part of Ax. residual: (tokens, hidden). weight: (hidden,), of the norm.

    Returns:
        RMSNorm(h) and h, (tokens, hidden) in the residual's type; sums in float32, or wider if the residual is.
    """
    wide = torch.promote_types(residual.dtype, torch.float32)
    total = outputs.to(wide).sum(0) + correction(latents.to(wide).sum(0), compensator) + residual.to(wide)
    return rms_norm(total, weight, epsilon).to(residual.dtype), total.to(residual.dtype)
