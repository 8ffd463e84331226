"""Norms queries and keys, rotates them by their positions, and writes keys and values to the paged cache."""

from __future__ import annotations

import torch

from kernels.rope_kv_write import reference
from kernels.rope_kv_write.reference import Llama3Scaling, rope_table

__all__ = ["Llama3Scaling", "rope_kv_write", "rope_table"]


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Compute `reference.rope_kv_write`, on CUDA by one kernel."""
    if qkv.is_cuda:
        from kernels.rope_kv_write import triton

        return triton.rope_kv_write(
            qkv.contiguous(),
            positions,
            slots,
            cos,
            sin,
            k_cache,
            v_cache,
            q_norm=q_norm,
            k_norm=k_norm,
            epsilon=epsilon,
        )
    return reference.rope_kv_write(
        qkv, positions, slots, cos, sin, k_cache, v_cache, q_norm=q_norm, k_norm=k_norm, epsilon=epsilon
    )
