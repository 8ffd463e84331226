"""Caches in pages, and how far attention over them may be from float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half the distance of two neighbouring numbers, relative."""


def assert_near(result: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, tokens: int, width: int) -> None:
    """The result is as near as rounding allows, as a part of the largest value there is.

    Weights and the output are rounded to the type (the weights on a GPU only; the interpreter cuts where a GPU
    rounds, so that the output may be off by twice the half unit): 3 half units. Sums of n float32 products err by √n
    half units of float32 where errors are independent, which leaves 8 times that for where they are not: scores are
    sums over the head, and move weights by as much again; the output is a sum over the tokens.
    """
    tolerance = 3 * ROUNDING[dtype] + 8 * ROUNDING[torch.float32] * (math.sqrt(width) + math.sqrt(tokens))
    assert result.isfinite().all()
    assert (result.double().cpu() - exact).abs().max().item() <= tolerance * max(1e-30, exact.abs().max().item())


@dataclass
class Paged:
    """Caches in pages, and the contiguous tokens of each sequence that lie in them."""

    caches: list[torch.Tensor]
    tables: torch.Tensor
    lengths: torch.Tensor
    tokens: list[list[torch.Tensor]]


def paged(
    lengths: list[int], inner: tuple[int, ...], block_size: int, dtype: torch.dtype, device: str, count: int
) -> Paged:
    """`count` caches of tokens of shape `inner`, pages in any order; every slot that no sequence owns is NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) * 31 + block_size)
    max_pages = max(1, max(-(-length // block_size) for length in lengths))
    blocks = len(lengths) * max_pages + 1
    order = torch.randperm(blocks - 1, generator=generator) + 1
    tables = order.view(len(lengths), max_pages).to(torch.int32)
    caches, tokens = [], []
    for _ in range(count):
        cache = torch.full((blocks, block_size, *inner), float("nan"))
        rows = [torch.randn(length, *inner, generator=generator).to(dtype) for length in lengths]
        for table, owned in zip(tables, rows, strict=True):
            t = torch.arange(len(owned))
            cache[table[t // block_size], t % block_size] = owned.to(cache.dtype)
        caches.append(cache.to(device, dtype))
        tokens.append(rows)
    for i, length in enumerate(lengths):  # entries that are not used are valid but strange
        tables[i, -(-length // block_size) :] = 0
    return Paged(caches, tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device), tokens)
