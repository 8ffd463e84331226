"""Gathers blocks of a cache into one contiguous buffer, which one engine sends to another, and scatters them back."""

from __future__ import annotations

import torch


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """buffer[..., i, ...] = cache[..., blocks[i], ...].

    Args:
        cache: (blocks, ...) with axis 0, or (layers, blocks, ...) with axis 1; contiguous.
        blocks: (n,), int32.

    Returns:
        The shape of the cache, with n in the place of its blocks.
    """
    return cache.index_select(axis, blocks)


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, axis: int = 0) -> None:
    """cache[..., blocks[i], ...] = buffer[..., i, ...], in place; the inverse of `gather_blocks`.

    Args:
        blocks: (n,), int32, no block twice.
        buffer: from `gather_blocks`.
    """
    cache.index_copy_(axis, blocks.long(), buffer)
