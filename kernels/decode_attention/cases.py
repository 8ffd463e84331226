"""Benchmark cases of decode attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.decode_attention import decode_attention, decode_work
from kernels.microbenchmark import Case
from kernels.shapes import Shape


def cases(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    block_size: int = 16,
    padded: Callable[[int], int] = lambda blocks: blocks,
) -> Iterator[Case]:
    """Sequences of one length, their pages in random order, at each batch and context.

    `padded`: columns of a block table with so many blocks; what is launched depends on them.
    """
    for batch in batches:
        for context in contexts:
            cache = 2 * batch * context * shape.kv_heads * shape.head_dim * dtype.itemsize
            ends = 2 * batch * shape.heads * shape.head_dim * dtype.itemsize
            yield Case(
                operation="decode_attention",
                sizes={"batch": batch, "context": context, **shape.heads_sizes(), "block_size": block_size},
                prepare=partial(_prepare, shape, batch, context, block_size, padded, device, dtype),
                moved=cache + ends,
                flops=4 * batch * context * shape.heads * shape.head_dim,
            )


def _prepare(
    shape: Shape,
    batch: int,
    context: int,
    block_size: int,
    padded: Callable[[int], int],
    device: str,
    dtype: torch.dtype,
) -> Callable[[], object]:
    pages = -(-context // block_size)
    blocks = batch * pages
    tables = torch.randperm(blocks, device=device).view(batch, pages).to(torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    tables = torch.nn.functional.pad(tables, (0, padded(tables.shape[1]) - tables.shape[1]))
    size = (blocks, block_size, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(batch, shape.heads, shape.head_dim, device=device, dtype=dtype)
    work = decode_work(lengths, tables, k)  # once for all layers of a step
    return lambda: decode_attention(q, k, v, tables, lengths, shape.head_dim**-0.5, work=work)
