"""The mathematics of decode attention: one new token of each sequence attends to its paged cache.

Pages are gathered first. All sequences then attend at once under a mask of their lengths, by PyTorch's fused attention,
with the heads that share a key as its queries. On one CPU thread (4 query heads on 2 of 64, float32 and bfloat16,
batches of 1 to 32, up to 1,024 tokens) this was the fastest of the ways tried: it takes 50 to 100 % of the time of a
loop of fused attention over sequences, and about half of that of matrix products with a softmax between them.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    longest: int | None = None,
    work: object = None,
) -> torch.Tensor:
    """out[b, h] = softmax(scale · q[b, h] · Kᵀ) V, over the first lengths[b] tokens of sequence b.

    Query head h attends to key head h // (heads / kv_heads), as in GQA (arXiv 2305.13245).

    Args:
        q: (batch, heads, head_dim).
        k_cache, v_cache: (blocks, block_size, kv_heads, head_dim). Token t of sequence b lies at
            [block_tables[b, t // block_size], t % block_size]. Slots that no token was written to must be finite here
            (not for the kernel): they are weighed by 0.
        block_tables: (batch, blocks of the longest), int32; entries past a sequence's length are any valid block.
        lengths: (batch,), int32. A length of 0 is a padded row: its output is 0.
        longest: no length is above it; known without asking the device. Default: what the tables can hold.
        work: of `decode_work`, for the same lengths, tables and sizes of the cache; None: computed here if needed.

    Returns:
        (batch, heads, head_dim), in q's type.
    """
    batch, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    bound = _bound(block_tables, lengths, k_cache.shape[1], longest)
    keys, values = (gather_pages(cache, block_tables, bound).transpose(1, 2) for cache in (k_cache, v_cache))
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
    return _attend(grouped, keys, values, lengths, scale).reshape(batch, heads, head_dim)


def decode_work(lengths: torch.Tensor, block_tables: torch.Tensor, k_cache: torch.Tensor) -> object:
    """The part of `decode_attention` that all layers of a step share, as it depends on lengths alone: here, nothing."""
    return None


def latent_decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    latent: int,
    *,
    longest: int | None = None,
) -> torch.Tensor:
    """Compute `decode_attention` where all heads share one key, whose first `latent` columns are the value.

    This is multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) with the up-projections absorbed
    into the query and the output.

    Args:
        q: (batch, heads, latent + rope_dim).
        cache: (blocks, block_size, latent + rope_dim).

    Returns:
        (batch, heads, latent), in q's type.
    """
    bound = _bound(block_tables, lengths, cache.shape[1], longest)
    keys = gather_pages(cache, block_tables, bound).unsqueeze(1)
    return _attend(q.unsqueeze(1), keys, keys[..., :latent], lengths, scale).squeeze(1)


def gather_pages(cache: torch.Tensor, block_tables: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first pages of every sequence, one after another: (batch, whole pages ≥ tokens, ...)."""
    block_size = cache.shape[1]
    pages = max(1, -(-tokens // block_size))
    pages_of_rows = cache.index_select(0, block_tables[:, :pages].reshape(-1))
    return pages_of_rows.view(len(block_tables), pages * block_size, *cache.shape[2:])


def _bound(block_tables: torch.Tensor, lengths: torch.Tensor, block_size: int, longest: int | None) -> int:
    """The longest length; computed here, where reading it costs nothing, since the arguments are only an upper
    bound.
    """
    there = int(lengths.max()) if len(lengths) else 0
    bound = block_tables.shape[1] * block_size if longest is None else longest
    assert there <= bound, f"a length of {there} is above its bound of {bound}"
    return there


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of (batch, kv_heads, group, d) over (batch, kv_heads, tokens, d), masked by length.

    A row whose mask leaves nothing is 0, as PyTorch defines it.
    """
    inside = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    return scaled_dot_product_attention(q, keys, values, attn_mask=inside[:, None, None], scale=scale)
