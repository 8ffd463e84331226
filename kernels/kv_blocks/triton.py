"""Copies blocks of any type, as words that are as wide as their sizes and addresses allow."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped

THREAD_BYTES = 64
"""Four loads of 16 bytes under way in each thread: 128 KB on a multiprocessor of 2,048 threads."""


@triton.jit(do_not_specialize=["count"])
def copy_blocks_kernel(
    cache_ptr,
    blocks_ptr,
    buffer_ptr,
    words,
    layer_stride,
    count,
    TO_CACHE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """WORDS of one of `count` blocks of layer program_id(1); `words` a block, `layer_stride` a layer of cache.

    Pieces and blocks share the grid's first axis, the only one that may have more than 65,535.
    """
    pieces = tl.cdiv(words, WORDS)
    place = tl.program_id(0) // pieces
    layer = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks_ptr + place).to(tl.int64)
    word = tl.program_id(0) % pieces * WORDS + tl.arange(0, WORDS)
    inside = word < words
    paged = cache_ptr + layer * layer_stride + block * words + word
    packed = buffer_ptr + (layer * count + place) * words + word
    if TO_CACHE:
        tl.store(paged, tl.load(packed, mask=inside), mask=inside)
    else:
        tl.store(packed, tl.load(paged, mask=inside), mask=inside)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Compute `reference.gather_blocks`; the cache contiguous."""
    buffer = torch.empty(
        (*cache.shape[:axis], len(blocks), *cache.shape[axis + 1 :]), dtype=cache.dtype, device=cache.device
    )
    _copy(cache, blocks, buffer, axis, to_cache=False)
    return buffer


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, axis: int = 0) -> None:
    """Compute `reference.scatter_blocks`; the cache contiguous."""
    _copy(cache, blocks, buffer.contiguous(), axis, to_cache=True)


def _copy(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor, axis: int, *, to_cache: bool) -> None:
    expected = (*cache.shape[:axis], len(blocks), *cache.shape[axis + 1 :])
    assert buffer.shape == expected, f"a buffer of {tuple(buffer.shape)} where {expected} was expected"
    assert buffer.dtype == cache.dtype, f"a buffer of {buffer.dtype} for a cache of {cache.dtype}"
    assert cache.is_contiguous(), "a block must be one piece"
    assert buffer.is_contiguous(), "a block must be one piece"
    if buffer.numel() == 0:
        return
    size = math.prod(cache.shape[axis + 1 :]) * cache.element_size()
    word = next(kind for kind in WORDS if size % kind.itemsize == 0 and _divides(kind.itemsize, cache, buffer))
    words = size // word.itemsize
    at_once, warps = select(words, word.itemsize)
    copy_blocks_kernel[(triton.cdiv(words, at_once) * len(blocks), math.prod(cache.shape[:axis]))](
        cache.view(-1).view(word),
        blocks,
        buffer.view(-1).view(word),
        words,
        words * cache.shape[axis],
        len(blocks),
        TO_CACHE=to_cache,
        WORDS=at_once,
        num_warps=warps,
    )


WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _divides(size: int, *tensors: torch.Tensor) -> bool:
    """True if all begin at a multiple of `size`, in memory and (a view of such words requires it) in their storage."""
    begins = (
        begin for tensor in tensors for begin in (tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())
    )
    return all(begin % size == 0 for begin in begins)


def select(words: int, word_bytes: int) -> tuple[int, int]:
    """Words and warps of a program: `THREAD_BYTES` a thread, 4 warps, or fewer if a block is smaller."""
    at_once = min(128 * THREAD_BYTES // word_bytes, triton.next_power_of_2(words))
    return at_once, max(1, min(4, at_once * word_bytes // (32 * THREAD_BYTES)))


def _shipped(size: int, *, to_cache: bool) -> Shipped:
    at_once, warps = select(size // 8, 8)
    return Shipped(
        copy_blocks_kernel,
        "*i64 *i32 *i64 i32 i64 i32",
        {"TO_CACHE": to_cache, "WORDS": at_once},
        num_warps=warps,
        aligned=("words", "layer_stride"),
    )


SHIPPED = [_shipped(size, to_cache=to_cache) for size in (2048, 1 << 15) for to_cache in (False, True)]
