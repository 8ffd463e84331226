"""Gathers blocks of a cache into one contiguous buffer, and scatters them back."""

from __future__ import annotations

import torch

from kernels.kv_blocks import reference


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Compute `reference.gather_blocks`, on CUDA by one kernel for all layers."""
    if cache.is_cuda:
        from kernels.kv_blocks import triton

        return triton.gather_blocks(cache, blocks, axis)
    return reference.gather_blocks(cache, blocks, axis)


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, axis: int = 0) -> None:
    """Compute `reference.scatter_blocks`, on CUDA by one kernel for all layers."""
    if cache.is_cuda:
        from kernels.kv_blocks import triton

        triton.scatter_blocks(cache, blocks, buffer.contiguous(), axis)
    else:
        reference.scatter_blocks(cache, blocks, buffer, axis)
