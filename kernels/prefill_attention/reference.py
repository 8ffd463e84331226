"""The mathematics of prefill attention: chunks of prompts attend to their paged caches, one sequence at a time."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Token i of the chunk of sequence s attends to the first context_lengths[s] + i + 1 tokens of s.

    The keys and values of the chunk itself are in the cache already. Query head h attends to key head
    h // (heads / kv_heads).

    Args:
        q: (tokens, heads, head_dim): chunk after chunk.
        k_cache, v_cache: (blocks, block_size, kv_heads, head_dim). Token t of sequence s lies at
            [block_tables[s, t // block_size], t % block_size].
        block_tables: (sequences, blocks of the longest), int32.
        cu_seqlens: (sequences + 1,), int32, from 0: the chunk of s is q[cu_seqlens[s] : cu_seqlens[s + 1]]. It may be
            empty. Rows after the last chunk are padding: their output is 0.
        context_lengths: (sequences,), int32: tokens of each sequence before its chunk.

    Returns:
        (tokens, heads, head_dim), in q's type.
    """
    out = torch.zeros_like(q)
    bounds = cu_seqlens.tolist()
    for s, context in enumerate(context_lengths.tolist()):
        begin, end = bounds[s : s + 2]
        if begin < end:
            keys, values = (_tokens(cache, block_tables[s], context + end - begin) for cache in (k_cache, v_cache))
            out[begin:end] = _attend(q[begin:end], keys, values, context, scale)
    return out


def _tokens(cache: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    pages = cache.index_select(0, table[: -(-tokens // cache.shape[1])])
    return pages.flatten(0, 1)[:tokens]


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int, scale: float) -> torch.Tensor:
    """Causal attention of one chunk: key heads are the batch, so that their groups of query heads need no copies."""
    tokens, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    grouped = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (tensor.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1) for tensor in (keys, values))
    if context == 0:
        out = scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale)
    else:
        mask = torch.ones(tokens, len(keys), dtype=torch.bool, device=q.device).tril(context)
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)
