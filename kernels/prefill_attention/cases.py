"""Benchmark cases of prefill attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels.microbenchmark import Case
from kernels.prefill_attention import prefill_attention, prompt_attention
from kernels.shapes import Shape


def cases(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    batches: Sequence[int],
    chunks: Sequence[int],
    contexts: Sequence[int],
    *,
    block_size: int = 16,
) -> Iterator[Case]:
    """Chunks of one length behind contexts of one length, at each combination; pages in random order."""
    for batch in batches:
        for chunk in chunks:
            for context in contexts:
                ends = 2 * batch * chunk * shape.heads * shape.head_dim * dtype.itemsize
                cache = 2 * batch * (context + chunk) * shape.kv_heads * shape.head_dim * dtype.itemsize
                pairs = batch * (chunk * context + chunk * (chunk + 1) // 2)
                yield Case(
                    operation="prefill_attention",
                    sizes={
                        "batch": batch,
                        "chunk": chunk,
                        "context": context,
                        **shape.heads_sizes(),
                        "block_size": block_size,
                    },
                    prepare=partial(_prepare, shape, batch, chunk, context, block_size, device, dtype),
                    moved=ends + cache,
                    flops=4 * pairs * shape.heads * shape.head_dim,
                )


def prompt_cases(shape: Shape, device: str, dtype: torch.dtype, tokens: Sequence[int]) -> Iterator[Case]:
    """One prompt of each length without context, by PyTorch's attention, lying as an engine has it."""
    for count in tokens:
        (paged,) = cases(shape, device, dtype, [1], [count], [0])
        yield replace(paged, operation="prompt_attention", prepare=partial(_prompt, shape, count, device, dtype))


def _prompt(shape: Shape, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], object]:
    turned = torch.randn(tokens, shape.heads + shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
    qkv = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
    q, k, v = turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, -shape.kv_heads :]
    return lambda: prompt_attention(q, k, v, shape.head_dim**-0.5)


def _prepare(
    shape: Shape, batch: int, chunk: int, context: int, block_size: int, device: str, dtype: torch.dtype
) -> Callable[[], object]:
    pages = -(-(context + chunk) // block_size)
    tables = torch.randperm(batch * pages, device=device).view(batch, pages).to(torch.int32)
    size = (batch * pages, block_size, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(batch * chunk, shape.heads, shape.head_dim, device=device, dtype=dtype)
    bounds = torch.arange(0, batch * chunk + 1, chunk, dtype=torch.int32, device=device)
    contexts = torch.full((batch,), context, dtype=torch.int32, device=device)
    return lambda: prefill_attention(q, k, v, tables, bounds, contexts, shape.head_dim**-0.5)
