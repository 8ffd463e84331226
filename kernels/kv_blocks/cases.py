"""Benchmark cases of gathering and scattering blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.kv_blocks import gather_blocks, scatter_blocks
from kernels.microbenchmark import Case
from kernels.shapes import Shape


def cases(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    blocks: Sequence[int],
    *,
    block_size: int = 16,
    layers: int = 1,
    spread: int = 4,
) -> Iterator[Case]:
    """Each number of blocks, out of a cache of `spread` times as many, in random order."""
    for count in blocks:
        size = layers * count * block_size * shape.kv_heads * shape.head_dim * dtype.itemsize
        cache = (layers, spread * count, block_size, shape.kv_heads, shape.head_dim)
        for form in ("gather", "scatter"):
            yield Case(
                operation=f"kv_blocks/{form}",
                sizes={
                    "blocks": count,
                    "layers": layers,
                    "kv_heads": shape.kv_heads,
                    "head_dim": shape.head_dim,
                    "block_size": block_size,
                },
                prepare=partial(_prepare, form, cache, count, device, dtype),
                moved=2 * size,
                flops=0,
            )


def _prepare(form: str, size: tuple[int, ...], count: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    cache = torch.randn(size, device=device, dtype=dtype)
    blocks = torch.randperm(size[1], device=device)[:count].to(torch.int32)
    if form == "gather":
        return lambda: gather_blocks(cache, blocks, 1)
    buffer = torch.randn((size[0], count, *size[2:]), device=device, dtype=dtype)
    return lambda: scatter_blocks(cache, blocks, buffer, 1)
