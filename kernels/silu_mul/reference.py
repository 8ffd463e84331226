"""The mathematics of SiLU(gate) · up."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """y = gate / (1 + exp(−gate)) · up (SwiGLU, Shazeer 2020, without its projections).

    Args:
        packed: (..., 2 · intermediate): gate, then up, as one gate_up projection writes them. Computed in float32, or
            in its own type if that is wider.

    Returns:
        (..., intermediate), in the type of `packed`.
    """
    wide = packed.to(torch.promote_types(packed.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(packed.dtype)
