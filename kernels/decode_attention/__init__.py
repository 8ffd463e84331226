"""Attention of one new token of each sequence over its paged cache, also with keys and values as one latent vector."""

from __future__ import annotations

import torch

from kernels.decode_attention import reference


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    longest: int | None = None,
) -> torch.Tensor:
    """Compute `reference.decode_attention`, on CUDA by one kernel, or by two if the cache is split among programs.

    The split depends on shapes and `longest` alone, so that a CUDA graph holds for all lengths up to it.
    """
    if q.is_cuda:
        from kernels.decode_attention import triton

        return triton.decode_attention(q.contiguous(), k_cache, v_cache, block_tables, lengths, scale, longest=longest)
    return reference.decode_attention(q, k_cache, v_cache, block_tables, lengths, scale, longest=longest)


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
    """Compute `reference.latent_decode_attention`, on CUDA by one or two kernels like `decode_attention`."""
    if q.is_cuda:
        from kernels.decode_attention import triton

        return triton.latent_decode_attention(
            q.contiguous(), cache, block_tables, lengths, scale, latent, longest=longest
        )
    return reference.latent_decode_attention(q, cache, block_tables, lengths, scale, latent, longest=longest)
