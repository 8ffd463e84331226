"""The mathematics of RMSNorm."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """y = x / √(mean(x²) + ε) · weight, over the last axis.

    Args:
        x: (..., hidden). weight: (hidden,). Sums are taken in float32, or in x's own type if that is wider.

    Returns:
        (..., hidden), in x's type.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual, and RMSNorm of h.

    The norm sees the sum before it is rounded to x's type, so that fused and unfused differ by that rounding only.

    Args:
        x, residual: (..., hidden). weight: (hidden,).

    Returns:
        y and h, both (..., hidden) in x's type.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + residual.to(wide)
    return rms_norm(total, weight, epsilon).to(x.dtype), total.to(x.dtype)
