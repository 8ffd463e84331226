"""QK-norm, rotary position embedding and the write to the paged cache, as the mathematics."""

from __future__ import annotations

import math

import torch

from kernels.rms_norm.reference import rms_norm


def rope_table(
    positions: int, head_dim: int, theta: float, scaling: tuple[float, float, float, int] | None = None
) -> torch.Tensor:
    """Cosines and sines of every position: (positions, head_dim), cosines first, float32.

    Args:
        scaling: (factor, low_freq_factor, high_freq_factor, original positions), as Llama 3.1 stretches frequencies:
            long waves by `factor`, short ones not at all, and between the two limits in between.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        factor, low, high, original = scaling
        turns = original * frequencies / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (share + (1 - share) / factor)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Rotates queries and keys, and writes keys and values where they belong.

    Args:
        qkv: (tokens, (heads + 2 · kv_heads) · head_dim).
        positions: (tokens,) int64. slots: (tokens,) int64, block · block_size + offset; −1: write nothing.
        table: as `rope_table` makes it.
        k_cache, v_cache: (blocks, block_size, kv_heads, head_dim).
        q_norm, k_norm: (head_dim,), where queries and keys are normalised head by head before (Qwen3).

    Returns:
        Queries, (tokens, heads, head_dim).
    """
    kv_heads, head_dim = k_cache.shape[2:]
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, epsilon), rms_norm(k, k_norm, epsilon)
    cosines, sines = table[positions].unsqueeze(1).chunk(2, dim=-1)
    written = slots >= 0
    places = slots[written]
    k_cache.view(-1, kv_heads, head_dim)[places] = rotate(k, cosines, sines)[written]
    v_cache.view(-1, kv_heads, head_dim)[places] = v[written]
    return rotate(q, cosines, sines)


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Each pair (x[i], x[i + half]) turned by its angle, as Llama and Qwen3 pair them."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(x.dtype)
