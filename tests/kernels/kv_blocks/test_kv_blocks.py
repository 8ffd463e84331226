"""Blocks come and go bit by bit, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from kernels import kv_blocks as dispatch
from kernels.kv_blocks import reference, triton

SHAPES = [((9, 16, 2, 64), 0), ((3, 9, 16, 2, 63), 1), ((2, 12, 500), 1), ((9, 1, 1, 1), 0), ((2, 9, 2, 3000), 1)]


def bits(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random bytes: NaNs of every kind, infinities, and numbers below the smallest."""
    generator = torch.Generator().manual_seed(sum(shape))
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).to(device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_kernel_copies_every_bit(shape: tuple[int, ...], axis: int, dtype: torch.dtype, device: str) -> None:
    cache = bits(shape, dtype, device)
    blocks = torch.tensor([7, 0, 3, 8], dtype=torch.int32, device=device)
    buffer = triton.gather_blocks(cache, blocks, axis)
    raw = cache.view(torch.uint8)
    assert same(buffer, raw.index_select(axis, blocks.long()))
    target = bits(shape, dtype, device)
    target.view(torch.uint8).bitwise_not_()
    expected = target.clone().view(torch.uint8).index_copy_(axis, blocks.long(), buffer.view(torch.uint8))
    triton.scatter_blocks(target, blocks, buffer, axis)
    assert same(target, expected)


def test_caches_that_begin_at_an_odd_byte(device: str) -> None:
    memory = bits((1 + 6 * 32,), torch.uint8, device)
    cache = memory[1:].view(6, 32)
    blocks = torch.tensor([5, 2], dtype=torch.int32, device=device)
    assert same(triton.gather_blocks(cache, blocks), cache[[5, 2]])


def test_nothing_to_copy(device: str) -> None:
    cache = bits((4, 8), torch.float32, device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert triton.gather_blocks(cache, none).shape == (0, 8)
    triton.scatter_blocks(cache, none, cache[:0])


def test_a_buffer_of_another_shape_is_refused(device: str) -> None:
    cache = bits((4, 8), torch.float32, device)
    with pytest.raises(AssertionError, match="expected"):
        triton.scatter_blocks(cache, torch.zeros(3, dtype=torch.int32, device=device), cache[:2])


def test_reference_by_hand() -> None:
    cache = torch.arange(12.0).view(2, 3, 2)
    blocks = torch.tensor([2, 0], dtype=torch.int32)
    buffer = dispatch.gather_blocks(cache, blocks, 1)
    assert buffer.tolist() == [[[4, 5], [0, 1]], [[10, 11], [6, 7]]]
    dispatch.scatter_blocks(cache, blocks, -buffer, 1)
    assert cache.tolist() == [[[0, -1], [2, 3], [-4, -5]], [[-6, -7], [8, 9], [-10, -11]]]
    assert reference.gather_blocks(cache, torch.tensor([1], dtype=torch.int32)).tolist() == [cache[1].tolist()]
