"""Decode attention against float64, with the cache's pages in any order and what lies outside poisoned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels import decode_attention as dispatch
from kernels.decode_attention import reference, triton
from kernels.decode_attention.work_list import MAX_PARTS, Plan, select, work_list
from tests.kernels.paged import ROUNDING, assert_near, paged


def naive(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Float64, one sequence and one head at a time."""
    out = torch.zeros(*q.shape[:2], values[0].shape[-1], dtype=torch.float64)
    group = q.shape[1] // keys[0].shape[1]
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        for h in range(q.shape[1]):
            if len(k):
                weights = torch.softmax(k[:, h // group].double() @ q[b, h].double().cpu() * scale, dim=0)
                out[b, h] = weights @ v[:, h // group].double()
    return out


LENGTHS = [1, 0, 63, 500]


def cut(parts: int) -> Plan:
    """So many parts that would fill the GPU, and rows at the end of the list that stay empty; 1: whole sequences."""
    return Plan(0 if parts == 1 else 8 + parts, parts, 8)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "parts", "dtype"),
    [
        (2, 2, 64, 16, 1, torch.float32),
        (2, 2, 64, 16, 1, torch.bfloat16),
        (2, 2, 64, 16, 1, torch.float16),
        (8, 2, 128, 16, 3, torch.float32),
        (8, 2, 128, 16, 3, torch.bfloat16),
        (8, 2, 128, 16, 3, torch.float16),
        (14, 2, 80, 1, 2, torch.float32),
        (6, 1, 63, 256, 5, torch.bfloat16),
        (1, 1, 256, 32, 2, torch.float16),
    ],
)
def test_kernel_equals_float64(
    heads: int, kv_heads: int, head_dim: int, block_size: int, parts: int, dtype: torch.dtype, device: str
) -> None:
    inputs = paged(LENGTHS, (kv_heads, head_dim), block_size, dtype, device, 2)
    q = torch.randn(len(LENGTHS), heads, head_dim).to(device, dtype)
    scale = head_dim**-0.5
    result = triton.decode_attention(q, *inputs.caches, inputs.tables, inputs.lengths, scale, plan=cut(parts))
    assert_near(result, naive(q, *inputs.tokens, scale), dtype, max(LENGTHS), head_dim)
    assert result[1].eq(0).all()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("heads", "latent", "rope", "block_size", "parts", "dtype"),
    [(20, 64, 16, 16, 3, torch.float32), (20, 64, 16, 16, 3, torch.bfloat16), (16, 512, 64, 64, 1, torch.float16)],
)
def test_latent_kernel_equals_float64(
    heads: int, latent: int, rope: int, block_size: int, parts: int, dtype: torch.dtype, device: str
) -> None:
    lengths = [0, 1, 130]
    inputs = paged(lengths, (latent + rope,), block_size, dtype, device, 1)
    q = torch.randn(len(lengths), heads, latent + rope).to(device, dtype)
    scale = (latent + rope) ** -0.5
    result = triton.latent_decode_attention(
        q, inputs.caches[0], inputs.tables, inputs.lengths, scale, latent, plan=cut(parts)
    )
    keys = [latents[:, None] for latents in inputs.tokens[0]]
    exact = naive(q, keys, [latents[..., :latent] for latents in keys], scale)
    assert_near(result, exact, dtype, max(lengths), latent + rope)
    assert result[0].eq(0).all()


@pytest.mark.parametrize("dtype", [*ROUNDING, torch.float64])
def test_reference_equals_a_loop(dtype: torch.dtype) -> None:
    lengths = [500, 0, 17]
    inputs = paged(lengths, (2, 64), 16, dtype, "cpu", 2)
    q = torch.randn(3, 6, 64).to(dtype)
    for cache in inputs.caches:  # the reference weighs what lies outside by 0, which a NaN would survive
        cache.nan_to_num_(0.0)
    result = dispatch.decode_attention(q, *inputs.caches, inputs.tables, inputs.lengths, 0.2, longest=512)
    exact = naive(q, *inputs.tokens, 0.2)
    if dtype == torch.float64:
        torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_near(result, exact, dtype, 500, 64)
    assert result[1].eq(0).all()


def test_latent_reference_equals_a_loop() -> None:
    inputs = paged([40, 3, 0], (24,), 8, torch.float64, "cpu", 1)
    q = torch.randn(3, 5, 24, dtype=torch.float64)
    result = dispatch.latent_decode_attention(
        q, inputs.caches[0].nan_to_num_(0.0), inputs.tables, inputs.lengths, 0.3, 16
    )
    keys = [latents[:, None] for latents in inputs.tokens[0]]
    torch.testing.assert_close(result, naive(q, keys, [latents[..., :16] for latents in keys], 0.3))


def test_reference_by_hand() -> None:
    """Two keys whose scores are log 1 and log 3 weigh their values 1 : 3."""
    k = torch.tensor([0.0, math.log(3)]).view(1, 2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
    tables, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out = reference.decode_attention(torch.ones(1, 1, 1), k, v, tables, lengths, 1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 1), 7.0))


EQUAL = [1000] * 64
MIXES = {
    "one": [1000],
    "equal": EQUAL,
    "one long": [*EQUAL[1:], 60000],
    "log-normal": np.random.default_rng(1).lognormal(np.log(800), 1, 256).astype(int).clip(1, 65536).tolist(),
    "padded": [*EQUAL[:40], *[0] * 24],
}


def listed(lengths: list[int], longest: int, device: str) -> tuple[Plan, list[list[int]], list[int]]:
    """The plan at 8 key heads on an H200, the list's rows with work, and the first row of each sequence."""
    plan = select(len(lengths), 8, longest, 64, 528)
    work = work_list(torch.tensor(lengths, dtype=torch.int32, device=device), plan, 64)
    rows, first = work.parts.tolist(), work.first.tolist()
    assert all(row == [0, 0, 0] for row in rows[first[-1] :])
    return plan, rows[: first[-1]], first


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("longest", [4096, 65536])
@pytest.mark.parametrize("mix", MIXES)
def test_a_list_has_each_token_once_in_parts_of_about_one_size(mix: str, longest: int, device: str) -> None:
    lengths = [min(length, longest) for length in MIXES[mix]]
    plan, rows, first = listed(lengths, longest, device)
    for sequence, length in enumerate(lengths):
        own = rows[first[sequence] : first[sequence + 1]]
        assert [row[0] for row in own] == [sequence] * len(own)
        assert [0, *(row[2] for row in own)] == [*(row[1] for row in own), length]
    fair = max(64, -(-sum(lengths) // plan.fill))
    assert max(end - begin for _, begin, end in rows) <= max(fair, max(lengths) // MAX_PARTS) + 64
    assert len(rows) <= plan.items


@pytest.mark.parametrize(
    ("mix", "longest", "share"), [("equal", 4096, 0.39), ("one long", 65536, 0.74), ("log-normal", 65536, 0.74)]
)
def test_most_programs_have_work(mix: str, longest: int, share: float, device: str) -> None:
    """If each sequence had the programs that the longest may need, these shares were 0.38, 0.20 and 0.55."""
    plan, rows, _ = listed(MIXES[mix], longest, device)
    assert len(rows) / plan.items == pytest.approx(share, abs=0.01)


def test_short_sequences_need_no_list() -> None:
    assert select(66, 8, 512, 64, 528).items == 0
    assert select(65, 8, 512, 64, 528).items > 0, "they do not fill the GPU"
    assert select(1, 1, 64, 64, 528).items == 0
    assert select(1, 8, 131072, 64, 528).items <= MAX_PARTS


def test_a_bound_that_does_not_hold_is_seen() -> None:
    inputs = paged([20], (1, 16), 16, torch.float32, "cpu", 2)
    with pytest.raises(AssertionError, match="above its bound"):
        dispatch.decode_attention(torch.zeros(1, 1, 16), *inputs.caches, inputs.tables, inputs.lengths, 1.0, longest=16)
