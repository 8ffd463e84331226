"""Chunked prefill over a paged cache: one program a tile of a chunk's queries and a key head.

The rows of a tile are tokens × the query heads that share the key head, so that a short chunk still fills a matrix
instruction and keys are read once a group. The softmax is the online one of FlashAttention (arXiv 2205.14135): a
running maximum and sum, in powers of two. Tiles of keys that every row sees are gone through without a mask; only
those at the diagonal are compared.

Each program finds its own tile in `cu_seqlens`. The grid depends on the numbers of tokens and of sequences alone: the
host need not read the lengths, and a CUDA graph of padded sizes holds for all chunks that fit into them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped, dot_type

LOG2_E = 1.4426950408889634

FEWEST = 8
"""The least number of chunks, padding included, among which a program searches for its tile. A search among fewer is
not faster, and each power of two is compiled anew."""


@dataclass(frozen=True)
class Plan:
    """Rows of a query tile, tokens of a key tile, warps, and stages of the pipeline."""

    rows: int
    tile: int
    warps: int
    stages: int


def select(
    tokens: int, sequences: int, group: int, kv_heads: int, head_dim: int, multiprocessors: int, *, wgmma: bool
) -> Plan:
    """The largest tile that chunks of the mean length fill and that leaves no multiprocessor idle.

    128 rows on two warp groups are what a Hopper multiprocessor needs to be bound by its tensor cores, not by what it
    reads of its second-level cache; 64 rows are one matrix instruction of Hopper, 16 the smallest product there is.
    Heads above 128 leave registers for 64 rows.
    """
    largest = 128 if head_dim <= 128 else 64
    mean = -(-tokens // max(1, sequences)) * group
    for rows in (128, 64):
        tiles = -(-tokens * group // rows) * kv_heads
        if rows <= largest and 2 * mean > rows and tiles >= multiprocessors:
            return plan_for(rows, head_dim, wgmma=wgmma)
    return plan_for(max(16, triton.next_power_of_2(group)), head_dim, wgmma=wgmma)


def plan_for(rows: int, head_dim: int, *, wgmma: bool) -> Plan:
    """Tiles of 64 keys, or 32 where the rows and a wide head leave no registers for more.

    `wgmma` reads its factors in shared memory; the matrix instruction of other GPUs has them in registers.
    """
    wide = head_dim > 128 if rows < 64 else head_dim > 64 and not wgmma
    large = rows >= 128 or (rows == 64 and head_dim > 128)
    return Plan(rows, 32 if wide else 64, 8 if large else 4, 3)


@triton.jit
def _find_tile(cu_ptr, sequences, tokens, tile, TOKENS: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequence that a tile belongs to, and which of its tiles it is, from the last to the first.

    The padding after the last chunk counts as one more sequence. A tile beyond all is in sequence `sequences + 1`, or
    later. Late tiles of a chunk see more keys, and begin first.
    """
    index = tl.arange(0, SEQUENCES)
    begin = tl.load(cu_ptr + index, mask=index <= sequences, other=0)
    end = tl.load(cu_ptr + index + 1, mask=index < sequences, other=0)
    end = tl.where(index == sequences, tokens, end)
    tiles = tl.where(index <= sequences, tl.cdiv(end - begin, TOKENS), 0)
    sequence = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(index < sequence, tiles, 0), axis=0)
    tiles_here = tl.sum(tl.where(index == sequence, tiles, 0), axis=0)
    return sequence, tiles_here - 1 - (tile - before)


@triton.jit
def _go_through(
    total, running_max, running_sum, q,
    k_ptr, v_ptr,
    table, last_seen, begin, end, block_stride, token_stride, scale,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from `begin` to `end`; if MASKED, a row sees those at positions up to its `last_seen` only."""
    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TILE)
    for start in tl.range(begin, end, TILE):
        position = start + token
        valid = (column < HEAD_DIM)[None, :]
        if MASKED:
            inside = position < end
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            valid = inside[:, None] & valid
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        at = (block * block_stride + (position % BLOCK_SIZE) * token_stride)[:, None] + column[None, :]
        k = tl.load(k_ptr + at, mask=valid, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where(position[None, :] <= last_seen[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        running_max = new_max
        v = tl.load(v_ptr + at, mask=valid, other=0.0).to(DOT)
        total = tl.dot(weights.to(DOT), v, total * rescale[:, None], input_precision="ieee")
    return total, running_max, running_sum


@triton.jit(do_not_specialize=["sequences", "tokens", "table_stride"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, cu_ptr, contexts_ptr, out_ptr,
    sequences, tokens, table_stride, block_stride, token_stride, head_stride, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SEQUENCES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One tile of one chunk, for the GROUP query heads of one key head; `scale` includes log2 e.

    Neighbours in the grid are tiles of one sequence and share their keys in the second-level cache.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    sequence, tile = _find_tile(cu_ptr, sequences, tokens, tl.program_id(0), TOKENS, SEQUENCES)
    if sequence > sequences:
        return
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    first = tl.load(cu_ptr + sequence)
    padding = sequence == sequences
    after = tl.load(cu_ptr + sequence + 1, mask=sequence < sequences, other=0)
    length = tl.where(padding, tokens, after) - first
    row_token = tile * TOKENS + row // GROUP  # the row's token, counted from the beginning of the chunk
    there = (row < TOKENS * GROUP) & (row_token < length)
    line = (first + row_token).to(tl.int64) * (tl.num_programs(1) * GROUP) + kv_head * GROUP + row % GROUP
    at = line[:, None] * HEAD_DIM + column[None, :]
    mask = there[:, None] & (column < HEAD_DIM)[None, :]
    if padding:
        tl.store(out_ptr + at, tl.zeros([ROWS, COLUMNS], out_ptr.dtype.element_ty), mask=mask)
        return
    q = tl.load(q_ptr + at, mask=mask, other=0.0).to(DOT)
    context = tl.load(contexts_ptr + sequence)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    seen_by_all = (context + tile * TOKENS + 1) // TILE * TILE
    end = context + tl.minimum((tile + 1) * TOKENS, length)
    keys = k_ptr + kv_head.to(tl.int64) * head_stride
    values = v_ptr + kv_head.to(tl.int64) * head_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total, running_max, running_sum = _go_through(
        total, running_max, running_sum, q, keys, values, table, context + row_token, 0, seen_by_all,
        block_stride, token_stride, scale, HEAD_DIM, COLUMNS, BLOCK_SIZE, TILE, DOT, MASKED=False,
    )  # fmt: skip
    total, running_max, running_sum = _go_through(
        total, running_max, running_sum, q, keys, values, table, context + row_token, seen_by_all, end,
        block_stride, token_stride, scale, HEAD_DIM, COLUMNS, BLOCK_SIZE, TILE, DOT, MASKED=True,
    )  # fmt: skip
    total *= (1.0 / running_sum)[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lengths: torch.Tensor,
    scale: float,
    *,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Compute `reference.prefill_attention`; q and heads of the caches contiguous. `plan` overrides `select`."""
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    sequences, group = len(context_lengths), heads // kv_heads
    assert q.is_contiguous(), "heads must follow one another"
    assert k_cache.stride() == v_cache.stride(), "keys and values must lie alike"
    assert k_cache.stride(3) == block_tables.stride(1) == 1, "the last axis must be contiguous"
    out = torch.empty_like(q)
    if tokens == 0:
        return out
    plan = plan or _default(q, sequences, group, kv_heads)
    prefill_kernel[(most_tiles(tokens, sequences, plan.rows // group), kv_heads)](
        q, k_cache, v_cache, block_tables, cu_seqlens, context_lengths, out, sequences, tokens, block_tables.stride(0),
        *k_cache.stride()[:3], scale * LOG2_E, GROUP=group, HEAD_DIM=head_dim,
        COLUMNS=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size, ROWS=plan.rows, TILE=plan.tile,
        SEQUENCES=max(FEWEST, triton.next_power_of_2(sequences + 1)), DOT=dot_type(q.dtype), num_warps=plan.warps,
        num_stages=plan.stages,
    )  # fmt: skip
    return out


def _default(q: torch.Tensor, sequences: int, group: int, kv_heads: int) -> Plan:
    """The plan of `select`, but small tiles in float32, which has no tensor cores to fill and twice the bytes."""
    if q.dtype == torch.float32 or not q.is_cuda:
        return Plan(max(16, triton.next_power_of_2(group)), 16 if q.shape[2] > 128 else 32, 4, 3)
    gpu = torch.cuda.get_device_properties(q.device)
    processors = gpu.multi_processor_count
    return select(q.shape[0], sequences, group, kv_heads, q.shape[2], processors, wgmma=gpu.major == 9)


def most_tiles(tokens: int, sequences: int, tile: int) -> int:
    """An upper bound on the tiles of `sequences` chunks and the padding, which have `tokens` tokens together.

    Σ ⌈lᵢ / t⌉ ≤ Σ (lᵢ + t − 1) / t < Σ lᵢ / t + n + 1, over n + 1 parts, and it is a whole number.
    """
    return -(-tokens // tile) + sequences


def _shipped(
    head_dim: int, group: int, rows: int, kind: str = "bf16", *, wgmma: bool = True, chunks: int = 128
) -> Shipped:
    plan = plan_for(rows, head_dim, wgmma=wgmma)
    return Shipped(
        prefill_kernel,
        f"*{kind} *{kind} *{kind} *i32 *i32 *i32 *{kind} i32 i32 i32 i32 i32 i32 fp32",
        {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "COLUMNS": head_dim,
            "BLOCK_SIZE": 16,
            "ROWS": rows,
            "TILE": plan.tile,
            "SEQUENCES": chunks,
            "DOT": {"bf16": tl.bfloat16, "fp16": tl.float16}[kind],
        },
        num_warps=plan.warps,
        num_stages=plan.stages,
        aligned=("block_stride", "token_stride", "head_stride"),
        least_arch=90 if wgmma else 80,
    )


SHIPPED = [
    *(_shipped(head_dim, 4, rows, wgmma=False) for head_dim in (64, 128, 256) for rows in (16, 64)),
    *(_shipped(head_dim, 4, 16, wgmma=False, chunks=FEWEST) for head_dim in (64, 128, 256)),
    *(_shipped(head_dim, 4, 128, wgmma=False) for head_dim in (64, 128)),
    *(_shipped(head_dim, 4, 64) for head_dim in (64, 128, 256)),
    *(_shipped(head_dim, 4, 128) for head_dim in (64, 128)),
    *(_shipped(128, group, 128) for group in (1, 7)),
    _shipped(128, 8, 128, "fp16"),
]
