"""Chunked prefill against float64: chunks and contexts of odd lengths, empty chunks, padding, pages in any order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from kernels import prefill_attention as dispatch
from kernels.prefill_attention import reference, triton
from tests.kernels.paged import Paged, assert_near, paged


@dataclass
class Sample(Paged):
    """Chunks behind contexts, and padding."""

    q: torch.Tensor
    bounds: torch.Tensor
    contexts: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return (self.q, *self.caches, self.tables, self.bounds, self.contexts)


def sample(
    chunks: list[int], contexts: list[int], padding: int, heads: tuple[int, int, int], block_size: int,
    dtype: torch.dtype, device: str,
) -> Sample:  # fmt: skip
    query_heads, *inner = heads
    lengths = [context + chunk if chunk else 0 for context, chunk in zip(contexts, chunks, strict=True)]
    generator = torch.Generator().manual_seed(sum(chunks))
    q = torch.randn(sum(chunks) + padding, query_heads, heads[2], generator=generator).to(device, dtype)
    bounds, behind = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in ([0, *itertools.accumulate(chunks)], contexts)
    )
    caches = paged(lengths, tuple(inner), block_size, dtype, device, 2)
    return Sample(**vars(caches), q=q, bounds=bounds, contexts=behind)


def naive(inputs: Sample, scale: float) -> torch.Tensor:
    """Float64, one token at a time."""
    out = torch.zeros(inputs.q.shape, dtype=torch.float64)
    group = inputs.q.shape[1] // inputs.caches[0].shape[2]
    for s, (begin, end) in enumerate(itertools.pairwise(inputs.bounds.tolist())):
        keys, values = (rows[s].double().repeat_interleave(group, dim=1) for rows in inputs.tokens)
        for i in range(end - begin):
            visible = int(inputs.contexts[s]) + i + 1
            query = inputs.q[begin + i].double().cpu()
            weights = torch.softmax(torch.einsum("hd,thd->ht", query, keys[:visible]) * scale, dim=1)
            out[begin + i] = torch.einsum("ht,thd->hd", weights, values[:visible])
    return out


CHUNKS, CONTEXTS, PADDING = [63, 0, 1, 40], [0, 7, 500, 90], 9


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("heads", "block_size", "rows", "dtype"),
    [
        ((4, 2, 64), 16, 64, torch.float32),
        ((4, 2, 64), 16, 64, torch.bfloat16),
        ((7, 1, 128), 32, 128, torch.float32),
        ((7, 1, 128), 32, 128, torch.bfloat16),
        ((1, 1, 63), 1, 16, torch.float16),
        ((3, 3, 256), 256, 64, torch.float32),
    ],
)
def test_kernel_equals_float64(
    heads: tuple[int, int, int], block_size: int, rows: int, dtype: torch.dtype, device: str
) -> None:
    inputs = sample(CHUNKS, CONTEXTS, PADDING, heads, block_size, dtype, device)
    scale = heads[2] ** -0.5
    plan = triton.plan_for(rows, heads[2], wgmma=device == "cpu")
    result = triton.prefill_attention(*inputs.arguments(), scale, plan=plan)
    assert_near(result, naive(inputs, scale), dtype, 501, inputs.q.shape[2])
    assert result[-PADDING:].eq(0).all()


@pytest.mark.usefixtures("poisoned")
def test_nothing_but_padding(device: str) -> None:
    inputs = sample([0, 0], [3, 0], 40, (2, 1, 16), 16, torch.float32, device)
    assert triton.prefill_attention(*inputs.arguments(), 1.0).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_reference_equals_a_loop(dtype: torch.dtype) -> None:
    inputs = sample(CHUNKS, CONTEXTS, PADDING, (6, 2, 64), 16, dtype, "cpu")
    result = dispatch.prefill_attention(*inputs.arguments(), 0.2)
    if dtype == torch.float64:
        torch.testing.assert_close(result, naive(inputs, 0.2), rtol=1e-12, atol=1e-12)
    else:
        assert_near(result, naive(inputs, 0.2), dtype, 501, inputs.q.shape[2])


def test_reference_by_hand() -> None:
    """A chunk of two behind one token: scores log 1, log 3, log 4 weigh the values 4, 8, 0 as 1 : 3 : 4."""
    k = torch.tensor([1.0, 3.0, 4.0, 99.0]).log().view(1, 4, 1, 1)
    v = torch.tensor([4.0, 8.0, 0.0, 99.0]).view(1, 4, 1, 1)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    bounds, contexts = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    out = reference.prefill_attention(torch.ones(2, 1, 1), k, v, tables, bounds, contexts, 1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([28 / 4, 28 / 8]))


@pytest.mark.parametrize("tile", [1, 3, 16, 128])
def test_tiles_are_within_their_bound(tile: int) -> None:
    generator = torch.Generator().manual_seed(tile)
    for _ in range(200):
        parts = torch.randint(0, 3 * tile, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator)
        lengths = parts.tolist()
        needed = sum(-(-length // tile) for length in lengths)
        assert needed <= triton.most_tiles(sum(lengths), len(lengths) - 1, tile), "the last part is the padding"


def test_plans_fill_the_gpu() -> None:
    assert triton.select(8192, 4, 4, 8, 128, 132, wgmma=True).rows == 128
    assert triton.select(256, 1, 4, 8, 128, 132, wgmma=True).rows == 16
    assert triton.select(1024, 1, 4, 4, 128, 132, wgmma=True).rows == 64
    assert triton.select(2112, 1, 4, 4, 128, 132, wgmma=True).rows == 128
    assert triton.select(4096, 4096, 4, 8, 128, 132, wgmma=True).rows == 16, "decoding: 4 rows a sequence"
    assert triton.select(8192, 4, 4, 8, 256, 132, wgmma=True).rows == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_without_context_needs_no_cache(dtype: torch.dtype, device: str) -> None:
    inputs = sample([40], [0], PADDING, (6, 2, 64), 16, dtype, device)
    keys, values = (torch.cat([rows[0].to(device), inputs.q[40:, :2]]) for rows in inputs.tokens)
    result = dispatch.prompt_attention(inputs.q, keys, values, 0.125)
    assert_near(result[:40], naive(inputs, 0.125)[:40], dtype, 40, 64)
