"""Paged decode attention: a list cuts sequences into parts, a program each, whose results a second kernel joins.

The operation is memory-bound: bytes must always be under way. A program copies a tile of keys and values to shared
memory (`cp.async`, 16 bytes a lane, since a token's head is contiguous) and waits for it, while others compute: four
share a multiprocessor, with 32 KB each, where 4.8 TB/s over the 132 multiprocessors of an H200 and a latency of 1 µs
ask for 36. With a second buffer, for the next tile (5 stages), three fit, which took 2 to 7 % longer on an H200.

The query heads of a key head are the rows of one matrix product, padded to the 16 that a tensor core takes. That holds
for a single head too: 16 rows are 16 operations a byte of cache, a tenth of what an H100's tensor cores have to spare
over its memory, and the product is what lets the compiler build the pipeline.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.decode_attention.work_list import MAX_PARTS, Plan, WorkList, select, work_list
from kernels.decode_attention.work_list import SHIPPED as work_list_kernels
from kernels.shipping import Shipped, dot_type

LOG2_E = 1.4426950408889634
RESIDENT = 4
"""Programs on a multiprocessor at once: 39 KB of an A100's 163 KB, and up to `REGISTERS` a thread."""
REGISTERS = 128
"""Given to the compiler for heads above 128, of which it would take 140 to 150; for others it takes fewer."""
STAGES = 3
"""Stages of the pipeline, which is one tile ahead with block numbers; keys and values have one buffer."""


def tile_for(head_dim: int, element: int) -> int:
    """Tokens of a tile: 16 KB of keys, and 64 at most; `element` is the bytes of one."""
    width: int = triton.next_power_of_2(head_dim)
    return max(16, min(64, 16384 // (width * element)))


@triton.jit
def _softmax_step(scores, running_max, running_sum):
    """Weights of a tile, the factor for earlier tiles, and the new maximum and sum. Scores are powers of two."""
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(running_max - new_max)
    return weights, rescale, new_max, running_sum * rescale + tl.sum(weights, axis=1)


@triton.jit
def _inverse(total):
    """1 / total, and 1 where there was nothing to sum."""
    return 1.0 / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _tokens_of(work_ptr, item, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """A program's sequence, its first token, and the one behind its last: of a listed part, or of a whole sequence."""
    sequence, begin = item, 0  # known to the compiler without SPLIT
    if SPLIT:
        sequence = tl.load(work_ptr + 3 * item)
        begin = tl.multiple_of(tl.load(work_ptr + 3 * item + 1), TILE)
        end = tl.load(work_ptr + 3 * item + 2)
    else:
        length = tl.load(work_ptr + sequence)
        end = tl.minimum(tl.cdiv(length, TILE) * TILE, length)  # the same: it saves a tenth of the loop
    return sequence, begin, end


@triton.jit(do_not_specialize=["table_stride"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, work_ptr, out_ptr, partial_ptr, lse_ptr,
    table_stride, block_stride, token_stride, head_stride, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One key head of one part of a sequence; neighbours in the grid read neighbours in memory.

    `scale` includes log2 e. `work_ptr`: with SPLIT a `WorkList`'s parts, else the lengths of whole sequences. Whole
    sequences go to `out_ptr`; parts go, normalised, to `partial_ptr` (heads, items, head_dim) with the logarithm (base
    2) of their sums in `lse_ptr` (heads, items). The number of items is no constant: it changes with batch and context,
    and each number would be compiled anew.
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    sequence, begin, end = _tokens_of(work_ptr, item, SPLIT, TILE)
    if SPLIT and begin >= end:
        return
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    token = tl.arange(0, TILE)
    head = (sequence * tl.num_programs(0) + kv_head).to(tl.int64) * GROUP + row
    q_mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * HEAD_DIM + column[None, :], mask=q_mask, other=0.0).to(DOT)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    within = kv_head * head_stride + column
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, TILE):
        position = start + token
        inside = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = (block * block_stride + (position % BLOCK_SIZE) * token_stride)[:, None] + within[None, :]
        valid = inside[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at, mask=valid, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        weights, rescale, running_max, running_sum = _softmax_step(scores, running_max, running_sum)
        v = tl.load(v_ptr + at, mask=valid, other=0.0).to(DOT)
        total = tl.dot(weights.to(DOT), v, total * rescale[:, None], input_precision="ieee")
    total *= _inverse(running_sum)[:, None]
    if not SPLIT:
        tl.store(out_ptr + head[:, None] * HEAD_DIM + column[None, :], total.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        place = (kv_head * GROUP + row).to(tl.int64) * tl.num_programs(1) + item
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + column[None, :], total, mask=q_mask)
        tl.store(lse_ptr + place, running_max + tl.log2(running_sum), mask=row < GROUP)


@triton.jit(do_not_specialize=["table_stride"])
def latent_decode_kernel(
    q_ptr, cache_ptr, tables_ptr, work_ptr, out_ptr, partial_ptr, lse_ptr,
    heads, table_stride, block_stride, token_stride, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The `decode_kernel` for ROWS of the heads that all share one key; a tile is read once, as key and as value."""
    first = tl.program_id(0) * ROWS
    item = tl.program_id(1)
    sequence, begin, end = _tokens_of(work_ptr, item, SPLIT, TILE)
    if SPLIT and begin >= end:
        return
    row = first + tl.arange(0, ROWS)
    row_mask = (row < heads)[:, None]
    column = tl.arange(0, LATENT)
    turned = LATENT + tl.arange(0, ROPE)
    token = tl.arange(0, TILE)
    head = sequence.to(tl.int64) * heads + row
    line = q_ptr + head[:, None] * (LATENT + ROPE)
    q = tl.load(line + column[None, :], mask=row_mask, other=0.0).to(DOT)
    q_rope = tl.load(line + turned[None, :], mask=row_mask, other=0.0).to(DOT)
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, LATENT], tl.float32)
    for start in tl.range(begin, end, TILE):
        position = start + token
        inside = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = cache_ptr + (block * block_stride + (position % BLOCK_SIZE) * token_stride)[:, None]
        k = tl.load(at + column[None, :], mask=inside[:, None], other=0.0).to(DOT)
        k_rope = tl.load(at + turned[None, :], mask=inside[:, None], other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        weights, rescale, running_max, running_sum = _softmax_step(scores, running_max, running_sum)
        total = tl.dot(weights.to(DOT), k, total * rescale[:, None], input_precision="ieee")
    total *= _inverse(running_sum)[:, None]
    if not SPLIT:
        tl.store(out_ptr + head[:, None] * LATENT + column[None, :], total.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        place = row.to(tl.int64) * tl.num_programs(1) + item
        tl.store(partial_ptr + place[:, None] * LATENT + column[None, :], total, mask=row_mask)
        tl.store(lse_ptr + place, running_max + tl.log2(running_sum), mask=row < heads)


@triton.jit(do_not_specialize=["items"])
def join_kernel(
    partial_ptr, lse_ptr, first_ptr, out_ptr,
    items,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PARTS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """out = Σ partial · 2^(lse − max) / Σ 2^(lse − max) over a sequence's parts; one program a head."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(first_ptr + sequence)
    parts = tl.load(first_ptr + sequence + 1) - first
    place = head.to(tl.int64) * items + first
    part = tl.arange(0, PARTS_PADDED)
    lse = tl.load(lse_ptr + place + part, mask=part < parts, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    highest = tl.where(parts > 0, highest, 0.0)
    norm = tl.sum(tl.exp2(lse - highest), axis=0)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, parts, AT_ONCE):
        here = start + tl.arange(0, AT_ONCE)
        there = here < parts
        weight = tl.exp2(tl.load(lse_ptr + place + here, mask=there, other=float("-inf")) - highest)
        source = partial_ptr + (place + here)[:, None] * HEAD_DIM + column[None, :]
        partial = tl.load(source, mask=there[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        total += tl.sum(partial * weight[:, None], axis=0)
    total *= _inverse(norm)
    target = out_ptr + (sequence * tl.num_programs(0) + head).to(tl.int64) * HEAD_DIM + column
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def decode_work(lengths: torch.Tensor, block_tables: torch.Tensor, k_cache: torch.Tensor) -> WorkList | None:
    """Compute `reference.decode_work`."""
    plan, tile = _plan(k_cache, block_tables, len(lengths), None)
    return work_list(lengths, plan, tile) if plan.items else None


def _plan(cache: torch.Tensor, block_tables: torch.Tensor, batch: int, longest: int | None) -> tuple[Plan, int]:
    block_size, kv_heads, head_dim = cache.shape[1:]
    bound = block_tables.shape[1] * block_size if longest is None else longest
    tile = tile_for(head_dim, cache.element_size())
    return select(batch, kv_heads, bound, tile, RESIDENT * multiprocessors(cache.device)), tile


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    longest: int | None = None,
    work: WorkList | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Compute `reference.decode_attention`; q contiguous, heads of the caches contiguous. `plan` overrides `select`.

    What is launched depends on shapes and `longest` alone, so that a CUDA graph holds for all lengths up to it.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    assert q.is_contiguous(), "heads must follow one another"
    assert k_cache.stride() == v_cache.stride(), "keys and values must lie alike"
    assert k_cache.stride(3) == block_tables.stride(1) == 1, "the last axis must be contiguous"
    usual, tile = _plan(k_cache, block_tables, batch, longest)
    plan = plan or usual
    if plan.items and work is None:
        work = work_list(lengths, plan, tile)
    out, partial, lse = _results(q, head_dim, work)
    decode_kernel[(kv_heads, batch if work is None else len(work.parts))](
        q, k_cache, v_cache, block_tables, lengths if work is None else work.parts, out, partial, lse,
        block_tables.stride(0), *k_cache.stride()[:3], scale * LOG2_E,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLIT=work is not None,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        TILE=tile, DOT=dot_type(q.dtype), num_warps=4, num_stages=STAGES, maxnreg=REGISTERS if head_dim > 128 else None,
    )  # fmt: skip
    if work is not None:
        _join(out, partial, lse, work)
    return out


def latent_decode_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    latent: int,
    *,
    longest: int | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Compute `reference.latent_decode_attention`; latent and rope_dim are powers of two, 16 or more."""
    batch, heads, width = q.shape
    block_size = cache.shape[1]
    assert q.is_contiguous(), "heads must follow one another"
    assert cache.stride(2) == block_tables.stride(1) == 1, "the last axis must be contiguous"
    assert min(latent, width - latent) >= 16, "both parts are factors of a matrix product"
    bound = block_tables.shape[1] * block_size if longest is None else longest
    rows, tile, warps = latent_tile(heads, q.element_size(), wgmma=has_wgmma(q.device))
    row_tiles = -(-heads // rows)
    slots = (1 if rows == 64 else 2) * multiprocessors(q.device)
    plan = plan or select(batch, row_tiles, bound, tile, slots)
    work = work_list(lengths, plan, tile) if plan.items else None
    out, partial, lse = _results(q, latent, work)
    latent_decode_kernel[(row_tiles, batch if work is None else len(work.parts))](
        q, cache, block_tables, lengths if work is None else work.parts, out, partial, lse, heads,
        block_tables.stride(0), *cache.stride()[:2], scale * LOG2_E,
        LATENT=latent, ROPE=width - latent, BLOCK_SIZE=block_size, SPLIT=work is not None,
        ROWS=rows, TILE=tile, DOT=dot_type(q.dtype), num_warps=warps, num_stages=2,
    )  # fmt: skip
    if work is not None:
        _join(out, partial, lse, work)
    return out


def latent_tile(heads: int, element: int, *, wgmma: bool) -> tuple[int, int, int]:
    """Heads, tokens and warps of a program.

    128 heads do 242 operations a byte of cache, about what an H200 has, so the rows fill a Hopper matrix instruction.
    Its 64 rows of 512 float32 are half of the registers; one program then has a multiprocessor to itself. Float32
    caches, for which there is no matrix instruction that exact, are for tests: small tiles that fit.
    """
    if element > 2:
        return 16, 16, 4
    if heads <= 16:
        return 16, 32, 4
    return (64, 32, 8) if wgmma and heads > 32 else (32, 32, 8)


def multiprocessors(device: torch.device) -> int:
    """The GPU's multiprocessors; without a GPU a few, so that the interpreter runs few programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def has_wgmma(device: torch.device) -> bool:
    """True if the GPU multiplies 64 rows at once (Hopper), and without a GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def _results(q: torch.Tensor, width: int, work: WorkList | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the buffers of parts, which are not used without a list."""
    out = torch.empty((*q.shape[:2], width), dtype=q.dtype, device=q.device)
    if work is None:
        return out, out, out
    partial = torch.empty((q.shape[1], len(work.parts), width), dtype=torch.float32, device=q.device)
    return out, partial, torch.empty(partial.shape[:2], dtype=torch.float32, device=q.device)


def _join(out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, work: WorkList) -> None:
    batch, heads, width = out.shape
    items = len(work.parts)
    constants = join_constants(width, min(items, MAX_PARTS))
    join_kernel[(heads, batch)](partial, lse, work.first, out, items, HEAD_DIM=width, **constants, num_warps=4)


def join_constants(width: int, parts: int) -> dict[str, int]:
    """The kernel's constants: parts are summed so many at once that a thread holds at most 32 values."""
    columns = triton.next_power_of_2(width)
    padded = triton.next_power_of_2(parts)
    return {"COLUMNS": columns, "PARTS_PADDED": padded, "AT_ONCE": max(1, min(padded, 4096 // columns))}


def _shipped(head_dim: int, group: int, split: bool, kind: str) -> Shipped:
    return Shipped(
        decode_kernel,
        f"*{kind} *{kind} *{kind} *i32 *i32 *{kind} {'*fp32 *fp32' if split else f'*{kind} *{kind}'}"
        " i32 i32 i32 i32 fp32",
        {
            "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "SPLIT": split, "ROWS": max(16, group),
            "COLUMNS": head_dim, "TILE": tile_for(head_dim, 2), "DOT": {"bf16": tl.bfloat16, "fp16": tl.float16}[kind],
        },
        num_warps=4, num_stages=STAGES, maxnreg=REGISTERS if head_dim > 128 else None,
        aligned=("block_stride", "token_stride", "head_stride"),
    )  # fmt: skip


def _shipped_latent(heads: int, split: bool, *, wgmma: bool = False) -> Shipped:
    rows, tile, warps = latent_tile(heads, 2, wgmma=wgmma)
    return Shipped(
        latent_decode_kernel,
        f"*bf16 *bf16 *i32 *i32 *bf16 {'*fp32 *fp32' if split else '*bf16 *bf16'} i32 i32 i32 i32 fp32",
        {
            "LATENT": 512, "ROPE": 64, "BLOCK_SIZE": 64, "SPLIT": split, "ROWS": rows, "TILE": tile, "DOT": tl.bfloat16,
        },
        num_warps=warps, num_stages=2, aligned=("heads", "block_stride", "token_stride"),
        least_arch=90 if wgmma else 80,
    )  # fmt: skip


def _shipped_join(width: int, parts: int) -> Shipped:
    return Shipped(join_kernel, "*fp32 *fp32 *i32 *bf16 i32", {"HEAD_DIM": width, **join_constants(width, parts)})


SHIPPED = [
    *(
        _shipped(head_dim, group, split, "bf16")
        for head_dim in (64, 128)
        for group in (1, 4)
        for split in (False, True)
    ),
    _shipped(128, 8, True, "fp16"),
    _shipped(256, 8, True, "bf16"),
    *(_shipped_latent(heads, split) for heads in (16, 128) for split in (False, True)),
    *(_shipped_latent(128, split, wgmma=True) for split in (False, True)),
    *(_shipped_join(width, parts) for width in (64, 128, 512) for parts in (17, 128)),
    *work_list_kernels,
]
