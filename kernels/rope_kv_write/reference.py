"""The mathematics of rotary positions, the norm of queries and keys, and the write of keys and values into pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.rms_norm.reference import rms_norm


@dataclass(frozen=True)
class Llama3Scaling:
    """The `rope_scaling` of a config.json with `rope_type` "llama3": contexts longer than those of the first training.

    Attributes:
        factor: slow rotations are slowed by this. original: max_position_embeddings of the first training.
        low, high: a rotation that turns at most `low` times in `original` positions is slow; from `high` on it stays
            as it is.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None = None) -> torch.Tensor:
    """ωᵢ = θ^(−2i / head_dim), i < head_dim / 2 (RoFormer, arXiv 2104.09864, eq. 15): radians a position, float64.

    With the scaling of Llama 3.1, a slow ω becomes ω / factor; between slow and fast it is a mean of both, weighted by
    the number of turns.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original * frequencies / (2 * math.pi)
    weight = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return weight * frequencies + (1 - weight) * frequencies / scaling.factor


def rope_table(
    head_dim: int,
    positions: int,
    theta: float,
    scaling: Llama3Scaling | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position · ωᵢ, each (positions, head_dim / 2), rounded once from float64."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), rope_frequencies(head_dim, theta, scaling))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


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
    keep_keys: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and write keys and values to their slots.

    Element i < head_dim / 2 of a head and element i + head_dim / 2 are the plane that turns (the convention of
    Hugging Face's Llama and Qwen3). With norms, each head is divided by its root mean square first, times the weight.
    Nothing is rounded between the norm and the turn.

    Args:
        qkv: (tokens, (heads + 2 · kv_heads) · head_dim): all queries, keys, then values of a token.
        positions: (tokens,), integers into the table; of a padded row any.
        slots: (tokens,), int64: block · block_size + offset in the caches; −1 for a padded row, which is not written.
        cos, sin: (most positions, head_dim / 2), float32, of `rope_table`.
        k_cache, v_cache: (blocks, block_size, kv_heads, head_dim), contiguous; written in place.
        q_norm, k_norm: (head_dim,), both or none.
        keep_keys: return the keys, too, those of padded rows included.

    Returns:
        Queries, (tokens, heads, head_dim), in qkv's type; with `keep_keys` (tokens, heads + kv_heads, head_dim).
    """
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    q, k, _ = wide.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, epsilon), rms_norm(k, k_norm, epsilon)
    cosine, sine = (table[positions].unsqueeze(1).to(wide.dtype) for table in (cos, sin))
    write = (slots >= 0).nonzero().squeeze(1)
    cache_slots = slots[write]
    v = qkv.view(len(qkv), -1, head_dim)[:, heads + kv_heads :]
    k = _turn(k, cosine, sine)
    k_cache.view(-1, kv_heads, head_dim)[cache_slots] = k.to(k_cache.dtype)[write]
    v_cache.view(-1, kv_heads, head_dim)[cache_slots] = v.to(v_cache.dtype)[write]
    q = _turn(q, cosine, sine)
    return (torch.cat((q, k), dim=1) if keep_keys else q).to(qkv.dtype)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(a, b) → (a cos − b sin, b cos + a sin), where a and b are the halves of a head."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
