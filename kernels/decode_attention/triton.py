"""Paged decode attention: the tokens of a sequence are split among programs, whose results a second kernel joins.

The operation is memory-bound: bytes must always be under way. A program streams tiles of keys and values through a
pipeline in shared memory (`cp.async`, 16 bytes a lane, since a token's head is contiguous), one tile ahead: 32 KB a
program, and four programs share a multiprocessor. That is 128 KB under way, where 4.8 TB/s over the 132
multiprocessors of an H200 and a latency of 1 µs ask for 36.

The query heads of a key head are the rows of one matrix product, padded to the 16 that a tensor core takes. That holds
for a single head too: 16 rows are 16 operations a byte of cache, a tenth of what an H100's tensor cores have to spare
over its memory, and the product is what lets the compiler build the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped

LOG2_E = 1.4426950408889634
RESIDENT = 4
"""Programs on a multiprocessor at once: 39 KB of an A100's 163 KB, and up to 128 registers a thread."""
LARGE_CHUNK = 512
"""Tokens that keep a program streaming long enough that its start and its partial result are noise (under 1 %)."""
MOST_SPLITS = 128
STAGES = 3
"""Stages of the pipeline of keys and values, which hold one tile ahead."""
MOST_WAVES = 16
"""Programs of a launch at most, for each that runs at once. The splits hold for every sequence up to the bound of the
lengths, so most programs of short ones have no work, and leave after one load: an estimated 1.7 ns each on an H200."""


@dataclass(frozen=True)
class Plan:
    """The split of each sequence's tokens among programs.

    Attributes:
        splits: programs a sequence and key head may have. least_tiles: tiles that a program takes at least, so that
            a short sequence is split less where there are programs enough.
    """

    splits: int
    least_tiles: int


def select(batch: int, kv_heads: int, longest: int, tile: int, slots: int) -> Plan:
    """Enough programs to fill the GPU; beyond that, chunks of `LARGE_CHUNK` tokens, which even out uneven lengths, or
    longer ones where there would be more programs than `MOST_WAVES` times those that run at once.

    Chunks of sequences that are shorter than `longest` are only as long as whole sequences would fill the GPU: 16 of
    1,000 tokens in tables of 4,096, split by 512, took 11 µs a layer longer on an H200 than 8 that were split further.

    `slots`: programs that the GPU runs at once.
    """
    tiles = max(1, -(-longest // tile))
    programs = -(-slots // max(1, batch * kv_heads))
    large = max(1, LARGE_CHUNK // tile)
    if programs * large <= tiles:
        most = max(programs, MOST_WAVES * slots // max(1, batch * kv_heads))
        least = max(1, min(large, large * batch * kv_heads // slots))
        return Plan(min(MOST_SPLITS, -(-tiles // large), most), least)
    return Plan(min(MOST_SPLITS, programs, tiles), 1)


def tile_for(head_dim: int, element: int) -> int:
    """Tokens of a tile: 16 KB of keys, and 64 at most; `element` is the bytes of one."""
    width: int = triton.next_power_of_2(head_dim)
    return max(16, min(64, 16384 // (width * element)))


@triton.jit
def _chunk(length, split, splits, least_tiles, TILE: tl.constexpr):
    """[begin, end) of a split: tiles are dealt evenly, by the sequence's own length."""
    size = tl.maximum(tl.cdiv(tl.cdiv(length, TILE), splits), least_tiles) * TILE
    return split * size, tl.minimum((split + 1) * size, length)


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


@triton.jit(do_not_specialize=["table_stride", "least_tiles"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    least_tiles,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """One split of one key head of one sequence; neighbours in the grid read neighbours in memory.

    `scale` includes log2 e. With one split the result goes to `out_ptr`; else it goes, normalised, to `partial_ptr`
    (batch, heads, splits, head_dim) with the logarithm (base 2) of its sum in `lse_ptr` (batch, heads, splits).
    The number of splits is no constant: it changes with batch and context, and each number would be compiled anew.
    """
    kv_head = tl.program_id(0)
    sequence = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    split, splits = 0, 1  # known to the compiler, which saves a tenth of the loop
    if SPLIT:
        split, splits = tl.program_id(1), tl.num_programs(1)
    begin, end = _chunk(length, split, splits, least_tiles, TILE)
    if SPLIT and begin >= end:
        return  # the second kernel knows how many splits wrote
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
        place = head * splits + split
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + column[None, :], total, mask=q_mask)
        tl.store(lse_ptr + place, running_max + tl.log2(running_sum), mask=row < GROUP)


@triton.jit(do_not_specialize=["table_stride", "least_tiles"])
def latent_decode_kernel(
    q_ptr,
    cache_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    heads,
    table_stride,
    block_stride,
    token_stride,
    least_tiles,
    scale,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    """The `decode_kernel` for ROWS of the heads that all share one key; a tile is read once, as key and as value."""
    first = tl.program_id(0) * ROWS
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    splits = tl.num_programs(1)
    begin, end = _chunk(length, split, splits, least_tiles, TILE)
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
        place = head * splits + split
        tl.store(partial_ptr + place[:, None] * LATENT + column[None, :], total, mask=row_mask)
        tl.store(lse_ptr + place, running_max + tl.log2(running_sum), mask=row < heads)


@triton.jit(do_not_specialize=["splits", "least_tiles"])
def join_kernel(
    partial_ptr,
    lse_ptr,
    lengths_ptr,
    out_ptr,
    splits,
    least_tiles,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """out = Σ partial · 2^(lse − max) / Σ 2^(lse − max) over the splits that wrote; one program a head."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    place = sequence.to(tl.int64) * tl.num_programs(0) + head
    length = tl.load(lengths_ptr + sequence)
    size, _ = _chunk(length, 1, splits, least_tiles, TILE)
    wrote = tl.cdiv(length, size)
    split = tl.arange(0, SPLITS_PADDED)
    lse = tl.load(lse_ptr + place * splits + split, mask=split < wrote, other=float("-inf"))
    highest = tl.max(lse, axis=0)
    highest = tl.where(length > 0, highest, 0.0)
    norm = tl.sum(tl.exp2(lse - highest), axis=0)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, wrote, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = part < wrote
        weight = tl.exp2(tl.load(lse_ptr + place * splits + part, mask=there, other=float("-inf")) - highest)
        source = partial_ptr + (place * splits + part)[:, None] * HEAD_DIM + column[None, :]
        partial = tl.load(source, mask=there[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        total += tl.sum(partial * weight[:, None], axis=0)
    total *= _inverse(norm)
    tl.store(out_ptr + place * HEAD_DIM + column, total.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    longest: int | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Compute `reference.decode_attention`; q contiguous, heads of the caches contiguous. `plan` overrides `select`.

    The split depends on shapes and `longest` alone, so that a CUDA graph holds for all lengths up to it.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    assert q.is_contiguous(), "heads must follow one another"
    assert k_cache.stride() == v_cache.stride(), "keys and values must lie alike"
    assert k_cache.stride(3) == block_tables.stride(1) == 1, "the last axis must be contiguous"
    bound = block_tables.shape[1] * block_size if longest is None else longest
    tile = tile_for(head_dim, k_cache.element_size())
    plan = plan or select(batch, kv_heads, bound, tile, RESIDENT * multiprocessors(q.device))
    out, partial, lse = _results(q, head_dim, plan)
    decode_kernel[(kv_heads, plan.splits, batch)](
        q,
        k_cache,
        v_cache,
        block_tables,
        lengths,
        out,
        partial,
        lse,
        block_tables.stride(0),
        *k_cache.stride()[:3],
        plan.least_tiles,
        scale * LOG2_E,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        SPLIT=plan.splits > 1,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)),
        COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        TILE=tile,
        DOT=dot_type(q),
        num_warps=4,
        num_stages=STAGES,
    )
    _join(out, partial, lse, lengths, plan, tile)
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
    out, partial, lse = _results(q, latent, plan)
    latent_decode_kernel[(row_tiles, plan.splits, batch)](
        q,
        cache,
        block_tables,
        lengths,
        out,
        partial,
        lse,
        heads,
        block_tables.stride(0),
        *cache.stride()[:2],
        plan.least_tiles,
        scale * LOG2_E,
        LATENT=latent,
        ROPE=width - latent,
        BLOCK_SIZE=block_size,
        SPLIT=plan.splits > 1,
        ROWS=rows,
        TILE=tile,
        DOT=dot_type(q),
        num_warps=warps,
        num_stages=2,
    )
    _join(out, partial, lse, lengths, plan, tile)
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


def dot_type(x: torch.Tensor) -> tl.dtype:
    """The type that matrices are multiplied in: their own, but float32 under the interpreter, which has no bfloat16."""
    native = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return native.get(x.dtype, tl.float32) if x.is_cuda else tl.float32


def _results(q: torch.Tensor, width: int, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the buffers of the splits, which are not used with one split."""
    out = torch.empty((*q.shape[:2], width), dtype=q.dtype, device=q.device)
    if plan.splits == 1:
        return out, out, out
    partial = torch.empty((*q.shape[:2], plan.splits, width), dtype=torch.float32, device=q.device)
    return out, partial, torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)


def _join(
    out: torch.Tensor, partial: torch.Tensor, lse: torch.Tensor, lengths: torch.Tensor, plan: Plan, tile: int
) -> None:
    if plan.splits == 1:
        return
    batch, heads, width = out.shape
    join_kernel[(heads, batch)](
        partial,
        lse,
        lengths,
        out,
        plan.splits,
        plan.least_tiles,
        HEAD_DIM=width,
        TILE=tile,
        **join_constants(width, plan.splits),
        num_warps=4,
    )


def join_constants(width: int, splits: int) -> dict[str, int]:
    """The kernel's constants: splits are summed so many at once that a thread holds at most 32 values."""
    columns = triton.next_power_of_2(width)
    padded = triton.next_power_of_2(splits)
    return {"COLUMNS": columns, "SPLITS_PADDED": padded, "AT_ONCE": max(1, min(padded, 4096 // columns))}


def _shipped(head_dim: int, group: int, split: bool, kind: str) -> Shipped:
    return Shipped(
        decode_kernel,
        f"*{kind} *{kind} *{kind} *i32 *i32 *{kind} {'*fp32 *fp32' if split else f'*{kind} *{kind}'}"
        " i32 i32 i32 i32 i32 fp32",
        {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "SPLIT": split,
            "ROWS": max(16, group),
            "COLUMNS": head_dim,
            "TILE": tile_for(head_dim, 2),
            "DOT": {"bf16": tl.bfloat16, "fp16": tl.float16}[kind],
        },
        num_warps=4,
        num_stages=3,
        aligned=("block_stride", "token_stride", "head_stride"),
    )


def _shipped_latent(heads: int, split: bool, *, wgmma: bool = False) -> Shipped:
    rows, tile, warps = latent_tile(heads, 2, wgmma=wgmma)
    return Shipped(
        latent_decode_kernel,
        f"*bf16 *bf16 *i32 *i32 *bf16 {'*fp32 *fp32' if split else '*bf16 *bf16'} i32 i32 i32 i32 i32 fp32",
        {
            "LATENT": 512,
            "ROPE": 64,
            "BLOCK_SIZE": 64,
            "SPLIT": split,
            "ROWS": rows,
            "TILE": tile,
            "DOT": tl.bfloat16,
        },
        num_warps=warps,
        num_stages=2,
        aligned=("heads", "block_stride", "token_stride"),
        least_arch=90 if wgmma else 80,
    )


def _shipped_join(width: int, splits: int) -> Shipped:
    return Shipped(
        join_kernel,
        "*fp32 *fp32 *i32 *bf16 i32 i32",
        {"HEAD_DIM": width, "TILE": 64, **join_constants(width, splits)},
    )


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
    *(_shipped_join(width, splits) for width in (64, 128, 512) for splits in (17, 128)),
]
