"""Attention of one step: decodes over paged caches, a chunk of a prompt after what is cached, and both.

Where the project has no kernel for a part, PyTorch's fused attention on a contiguous cache stands in; `VIA` says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.shapes import Shape

Call = Callable[[], object]

BLOCK = 16
"""Tokens of a page."""


def has(operation: str) -> bool:
    """Whether `kernels` has the operation's folder."""
    return importlib.util.find_spec(f"kernels.{operation}") is not None


def decode(shape: Shape, batch: int, context: int, device: str, dtype: torch.dtype) -> Call:
    """`batch` decodes that attend to `context` tokens each, their own among them."""
    q = torch.randn(batch, shape.heads, shape.head_dim, device=device, dtype=dtype)
    k, v = _caches(shape, batch * -(-context // BLOCK), device, dtype)
    tables = torch.randperm(len(k), device=device).view(batch, -1).to(torch.int32)
    scale = shape.head_dim**-0.5
    if has("decode_attention"):
        from kernels.decode_attention import decode_attention

        lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        return lambda: decode_attention(q, k, v, tables, lengths, scale, longest=context)

    def stand_in() -> object:
        keys, values = (each[tables].flatten(1, 2)[:, :context].transpose(1, 2) for each in (k, v))
        return functional.scaled_dot_product_attention(q[:, :, None], keys, values, scale=scale, enable_gqa=True)

    return stand_in


def prompt(shape: Shape, chunk: int, before: int, device: str, dtype: torch.dtype) -> Call:
    """`chunk` tokens of one prompt after `before` in the cache."""
    total = before + chunk
    q = torch.randn(1, shape.heads, chunk, shape.head_dim, device=device, dtype=dtype)
    k, v = _caches(shape, -(-total // BLOCK), device, dtype)
    table = torch.randperm(len(k), device=device)
    seen = torch.ones(chunk, total, dtype=torch.bool, device=device).tril(diagonal=before)

    def stand_in() -> object:
        keys, values = (each[table].flatten(0, 1)[None, :total].transpose(1, 2) for each in (k, v))
        if not before:
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)

    return stand_in


def _caches(shape: Shape, blocks: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    size = (blocks, BLOCK, shape.kv_heads, shape.head_dim)
    return torch.randn(size, device=device, dtype=dtype), torch.randn(size, device=device, dtype=dtype)
