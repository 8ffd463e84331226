"""Attention of prompt chunks over their paged context, as the mathematics."""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.decode_attention.reference import gather_pages


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    scale: float,
    *,
    longest: int | None = None,
) -> torch.Tensor:
    """Row i of a chunk attends to its context and to rows 0 … i of the chunk, all of them in the cache already.

    Args:
        q: (tokens, heads, head_dim), chunk after chunk.
        k_cache, v_cache: (blocks, block_size, kv_heads, head_dim).
        block_tables: (chunks, blocks), int32. starts: (chunks + 1,) int32, first rows. contexts: (chunks,) int32.

    Returns:
        (tokens, heads, head_dim).
    """
    out = torch.empty_like(q)
    bounds, before = starts.tolist(), contexts.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        size, total = end - begin, before[i] + end - begin
        keys, values = (
            gather_pages(cache, block_tables[i : i + 1], total)[:, :total].transpose(1, 2)
            for cache in (k_cache, v_cache)
        )
        mask = torch.ones(size, total, dtype=torch.bool, device=q.device).tril(before[i])
        query = q[begin:end].transpose(0, 1).unsqueeze(0)
        attended = scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)
        out[begin:end] = attended.squeeze(0).transpose(0, 1)
    return out
