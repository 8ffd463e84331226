"""Benchmark cases of the rotary positions and the write to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.microbenchmark import Case
from kernels.rope_kv_write import rope_kv_write, rope_table
from kernels.shapes import Shape


def cases(
    shape: Shape, device: str, dtype: torch.dtype, tokens: Sequence[int], *, block_size: int = 16
) -> Iterator[Case]:
    """At each number of tokens, each at a slot of its own, in random order."""
    elements = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    for count in tokens:
        num_bytes = count * (2 * elements * dtype.itemsize + 16 + 4 * shape.head_dim)
        yield Case(
            operation="rope_kv_write",
            sizes={"tokens": count, **shape.heads_sizes(), "qk_norm": int(shape.qk_norm)},
            prepare=partial(_prepare, shape, count, block_size, device, dtype),
            moved=num_bytes,
            flops=count * (shape.heads + shape.kv_heads) * shape.head_dim * (7 if shape.qk_norm else 3),
        )


def _prepare(shape: Shape, tokens: int, block_size: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = torch.randn(tokens, width, device=device, dtype=dtype)
    positions = torch.arange(tokens, device=device)
    blocks = -(-tokens // block_size)
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    cos, sin = rope_table(shape.head_dim, tokens, shape.rope_theta, device=device)
    caches = [
        torch.empty(blocks, block_size, shape.kv_heads, shape.head_dim, device=device, dtype=dtype) for _ in range(2)
    ]
    norm = torch.ones(shape.head_dim, device=device, dtype=dtype) if shape.qk_norm else None
    return lambda: rope_kv_write(
        qkv, positions, slots, cos, sin, *caches, q_norm=norm, k_norm=norm, epsilon=shape.epsilon
    )
