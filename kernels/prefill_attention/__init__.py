"""Attention of chunks of prompts over their paged caches."""

from __future__ import annotations

import torch

from kernels.prefill_attention import reference


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute `reference.prefill_attention`, on CUDA by one kernel.

    Its grid depends on the number of tokens and of sequences alone, so that a CUDA graph of padded sizes holds for
    whatever chunks fit into them.
    """
    if q.is_cuda:
        from kernels.prefill_attention import triton

        return triton.prefill_attention(
            q.contiguous(), k_cache, v_cache, block_tables, cu_seqlens, context_lengths, scale
        )
    return reference.prefill_attention(q, k_cache, v_cache, block_tables, cu_seqlens, context_lengths, scale)
