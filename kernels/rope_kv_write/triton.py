"""QK-norm, rotary positions and the write to the paged cache. Each element is read once and written once.

A program has a few heads of one token, all of them queries, keys or values. Each thread loads 16 bytes of the lower and
16 of the upper half of a head: the two that turn together. The norm is a sum over the threads of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, KEEP_KEYS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of heads of one token; of a token, blocks of queries come first, then keys, then values.

    `HALF` is head_dim / 2; COLUMNS ≥ HALF is a power of two. With KEEP_KEYS the keys of all rows follow the queries.
    """
    OUT_HEADS: tl.constexpr = HEADS + KV_HEADS if KEEP_KEYS else HEADS
    Q_BLOCKS: tl.constexpr = (HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    K_BLOCKS: tl.constexpr = (KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * K_BLOCKS
    block = tl.program_id(0) % BLOCKS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    row = tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, COLUMNS)
    line = qkv_ptr + token * ((HEADS + 2 * KV_HEADS) * 2 * HALF)
    if block < Q_BLOCKS:
        head = block * HEAD_BLOCK + row
        inside = (head < HEADS)[:, None] & (column < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + column[None, :]
        position = tl.load(positions_ptr + token).to(tl.int64)
        low, high = _normed_and_turned(
            line + at, inside, q_norm_ptr, cos_ptr, sin_ptr, position, column, epsilon, HALF, NORM
        )
        target = q_ptr + token * (OUT_HEADS * 2 * HALF) + at
        tl.store(target, low.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, high.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if not KEEP_KEYS and slot < 0:
            return
        is_value = block >= Q_BLOCKS + K_BLOCKS
        head = (block - Q_BLOCKS - tl.where(is_value, K_BLOCKS, 0)) * HEAD_BLOCK + row
        inside = (head < KV_HEADS)[:, None] & (column < HALF)[None, :]
        at = head[:, None] * (2 * HALF) + column[None, :]
        to = slot * (KV_HEADS * 2 * HALF) + at
        written = inside & (slot >= 0) if KEEP_KEYS else inside
        if is_value:
            source = line + (HEADS + KV_HEADS) * 2 * HALF + at
            low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
            tl.store(v_cache_ptr + to, low.to(v_cache_ptr.dtype.element_ty), mask=written)
            tl.store(v_cache_ptr + to + HALF, high.to(v_cache_ptr.dtype.element_ty), mask=written)
        else:
            position = tl.load(positions_ptr + token).to(tl.int64)
            source = line + HEADS * 2 * HALF + at
            low, high = _normed_and_turned(
                source, inside, k_norm_ptr, cos_ptr, sin_ptr, position, column, epsilon, HALF, NORM
            )
            tl.store(k_cache_ptr + to, low.to(k_cache_ptr.dtype.element_ty), mask=written)
            tl.store(k_cache_ptr + to + HALF, high.to(k_cache_ptr.dtype.element_ty), mask=written)
            if KEEP_KEYS:
                target = q_ptr + (token * OUT_HEADS + HEADS) * 2 * HALF + at
                tl.store(target, low.to(q_ptr.dtype.element_ty), mask=inside)
                tl.store(target + HALF, high.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed_and_turned(
    source, inside, norm_ptr, cos_ptr, sin_ptr, position, column, epsilon, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Lower and upper halves of heads, in float32."""
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    exists = column < HALF
    if NORM:
        squares = tl.sum(low * low + high * high, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + epsilon)[:, None]
        low *= scale * tl.load(norm_ptr + column, mask=exists, other=0.0).to(tl.float32)[None, :]
        high *= scale * tl.load(norm_ptr + HALF + column, mask=exists, other=0.0).to(tl.float32)[None, :]
    cosine = tl.load(cos_ptr + position * HALF + column, mask=exists, other=0.0)[None, :]
    sine = tl.load(sin_ptr + position * HALF + column, mask=exists, other=0.0)[None, :]
    return low * cosine - high * sine, high * cosine + low * sine


def select(heads: int, kv_heads: int, half: int) -> tuple[int, int]:
    """Heads and warps of a program: 8 elements of each half a thread, at most 4 warps, no block half empty.

    Blocks are as many heads as there are key heads, or 16; a last block of queries may be short.
    """
    block = min(16, triton.next_power_of_2(min(heads, kv_heads)))
    lanes = block * triton.next_power_of_2(half) // 8
    return block, max(1, min(4, lanes // 32))


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    keep_keys: bool = False,
) -> torch.Tensor:
    """Compute `reference.rope_kv_write`; all contiguous."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    assert (q_norm is None) == (k_norm is None), "both queries and keys are normed, or none"
    for tensor in (qkv, cos, sin, k_cache, v_cache):
        assert tensor.is_contiguous(), "heads and slots must follow one another"
    q = torch.empty((len(qkv), heads + kv_heads * keep_keys, head_dim), dtype=qkv.dtype, device=qkv.device)
    if len(qkv) == 0:
        return q
    block, warps = select(heads, kv_heads, head_dim // 2)
    rope_kv_write_kernel[((-(-heads // block) + 2 * -(-kv_heads // block)) * len(qkv),)](
        qkv, positions, slots, cos, sin, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, q,
        k_cache, v_cache, epsilon, HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, NORM=q_norm is not None,
        KEEP_KEYS=keep_keys, HEAD_BLOCK=block, COLUMNS=triton.next_power_of_2(head_dim // 2), num_warps=warps,
    )  # fmt: skip
    return q


def _shipped(heads: int, kv_heads: int, head_dim: int, *, norm: bool, keep_keys: bool = False) -> Shipped:
    block, warps = select(heads, kv_heads, head_dim // 2)
    weights = "*bf16 *bf16" if norm else "*fp32 *fp32"
    return Shipped(
        rope_kv_write_kernel,
        f"*bf16 *i64 *i64 *fp32 *fp32 {weights} *bf16 *bf16 *bf16 fp32",
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HALF": head_dim // 2,
            "NORM": norm,
            "KEEP_KEYS": keep_keys,
            "HEAD_BLOCK": block,
            "COLUMNS": head_dim // 2,
        },
        num_warps=warps,
    )


SHIPPED = [
    _shipped(16, 8, 128, norm=True),  # Qwen3-0.6B
    _shipped(32, 8, 128, norm=True),  # Qwen3-4B, 8B
    _shipped(32, 4, 128, norm=True),  # Qwen3-30B-A3B
    _shipped(32, 8, 128, norm=False),  # Llama-3.1-8B
    _shipped(32, 32, 128, norm=False),  # Llama-2-7B
    _shipped(32, 8, 64, norm=False),  # Llama-3.2-1B
    *(_shipped(32, 8, 128, norm=norm, keep_keys=True) for norm in (False, True)),
]
