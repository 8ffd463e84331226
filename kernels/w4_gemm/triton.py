"""Products with weights of 3 or 4 bits: one tile kernel for few tokens, Ŵ unpacked for a library GEMM for many.

The tile kernel computes (Ŵ · xᵀ), rows of Ŵ by tokens, so that unpacked weights are the tensor core's left operand,
which it takes from registers. Packed words go from memory to shared memory (128 bits a thread, several stages deep) and
from there, still packed, to the threads that need them. A pair of codes costs a shift, a mask that also sets the bits
of an exponent, and one packed subtraction of the middle, which is exact: two integers of bfloat16 or float16. The
products are exact too, and a group's sum is scaled in float32. In total that is 2.7 instructions a weight, also for one
token, where 15 of 16 columns of the tile are idle: without a tensor core a weight costs as many for its conversion and
its multiplication alone.

With one token, reading Ŵ takes all the time. The inputs are split so that 4 programs run on each multiprocessor. The
last program to arrive at a tile adds up the parts in their order, so that results do not depend on which one is last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped, dot_type
from kernels.w4_gemm.pack import GROUP, SPAN, STEPS, WORDS, PackedWeight


def _pair(value: float, dtype: torch.dtype) -> str:
    """A number twice in a word, in hexadecimal."""
    bits = int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF
    return f"{bits << 16 | bits:#x}"


def codes_ptx(bits: int, dtype: torch.dtype) -> tl.constexpr:
    """PTX for a word with two codes: as two numbers of a type, less 2^(bits − 1).

    A code in the lowest bits of a number whose exponent is set makes the number 128 + code (1,024 + code in float16).
    Mask and exponent are one instruction, which ptxas does not make of two constants, and so is the subtraction of both
    halves. Of 3 bits, the two low ones are in the first word and the high one is in the second.
    """
    kind, base = ("bf16x2", 128.0) if dtype == torch.bfloat16 else ("f16x2", 1024.0)
    exponent, one, less = (_pair(value, dtype) for value in (base, 1.0, -base - 2.0 ** (bits - 1)))
    parts = f"lop3.b32 t, $2, 0x000F000F, {exponent}, 0xEA;"
    if bits == 3:
        parts = f"lop3.b32 t, $3, 0x00040004, {exponent}, 0xEA; lop3.b32 t, $2, 0x00030003, t, 0xEA;"
    subtraction = f"mov.b32 o, {one}; mov.b32 l, {less}; fma.rn.{kind} t, t, o, l;"
    return tl.constexpr(f"{{ .reg .b32 t, o, l; {parts} {subtraction} mov.b32 {{$0, $1}}, t; }}")


BF16_FOUR, BF16_THREE = (codes_ptx(bits, torch.bfloat16) for bits in (4, 3))
FP16_FOUR, FP16_THREE = (codes_ptx(bits, torch.float16) for bits in (4, 3))


PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""

UNPACK_TOKENS = 256
"""Tokens from which it is faster to unpack Ŵ once and use the library's product: on an H200, of the four matrices of
Llama-3.1-8B in 4 bits, unpacking takes 0.66 to 0.92 of the tile kernel's time at 256 tokens, and 1.01 to 1.33 at 128.
"""

UNPACK_TOKENS_WITH_ZEROS = 65
"""The same with zero points, for which the tile kernel adds up activations besides, and has tiles of 32 tokens."""


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels, which knows no PTX."""

MOST_TILES_SPLIT = 512
"""Tiles that a weight's counters suffice for."""


@dataclass(frozen=True)
class Tiling:
    """The launch of the tile kernel: rows and tokens of a tile, programs that share its inputs, warps, stages."""

    rows: int
    tokens: int
    split: int
    num_warps: int
    num_stages: int


def select(
    tokens: int, outputs: int, blocks: int, bits: int = 4, has_zeros: bool = False, processors: int = PROCESSORS
) -> Tiling:
    """The tiling for a number of tokens, of rows of Ŵ, and of blocks of its inputs.

    64 rows are what one warpgroup multiplies at once. Up to 16 tokens, 4 programs fit on a multiprocessor, each with
    two stages of 8 KB of packed weights in flight: 64 KB, where latency times bandwidth is 25. Beyond 64 tokens two
    warpgroups share the activations' tile, and registers suffice for one program. Blocks of 3 bits, which are twice
    as long, and products with zero points are limited to 32 tokens: more would spill.

    Inputs are split as long as all programs run at once and each has 4 blocks; and further, if multiprocessors would
    otherwise have no work.
    """
    rows, warps = (64, 4) if tokens <= 64 else (128, 8)
    tile_tokens = max(16, min(32 if bits == 3 or has_zeros else 64, triton.next_power_of_2(tokens)))
    stages = {16: 3, 32: 3, 64: 2}[tile_tokens] - (bits == 3 and tile_tokens == 32)
    resident = 1 if tokens > 64 else {16: 4, 32: 3, 64: 3}[tile_tokens] // (1 if bits == 4 else 2)
    tiles = -(-outputs // rows) * -(-tokens // tile_tokens)
    split = min(resident * processors // tiles, blocks // 4)
    if tiles * split < processors and tiles <= MOST_TILES_SPLIT:
        split = min(processors // tiles, blocks)
    return Tiling(rows, tile_tokens, max(1, split), warps, stages)


@triton.jit
def code_pairs(low, high, STEP: tl.constexpr, BITS: tl.constexpr):
    """The codes of one step, two in each word: one in its lower half, one in its upper half."""
    if BITS == 4:
        return (low >> (4 * STEP)) & 0x000F000F
    two = (low >> (2 * STEP)) & 0x00030003
    if STEP < 2:
        return two | ((high << (2 - STEP)) & 0x00040004)
    return two | ((high >> (STEP - 2)) & 0x00040004)


@triton.jit
def less_middle(low, high, STEP: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr):
    """The codes of one step less 2^(BITS − 1), as a tile (ROWS, 64) of DOT, in which they are exact."""
    if INTERPRETED or tl.float32 == DOT:
        pairs = code_pairs(low, high, STEP, BITS)
        middle = 8 if BITS == 4 else 4
        first = ((pairs & 0xFFFF) - middle).to(DOT)
        second = ((pairs >> 16) - middle).to(DOT)
    else:
        if BITS == 4:
            high = low
            low = low >> (4 * STEP)
        else:
            high = high << (2 - STEP) if STEP < 2 else high >> (STEP - 2)
            low = low >> (2 * STEP)
        four: tl.constexpr = BF16_FOUR if tl.bfloat16 == DOT else FP16_FOUR
        three: tl.constexpr = BF16_THREE if tl.bfloat16 == DOT else FP16_THREE
        ptx: tl.constexpr = four if BITS == 4 else three
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16) if tl.bfloat16 == DOT else (tl.float16, tl.float16)
        first, second = tl.inline_asm_elementwise(ptx, "=h,=h,r,r", [low, high], types, is_pure=True, pack=1)
    return tl.join(first, second).reshape(ROWS, 64)


@triton.jit
def load_groups(values_ptr, block, row, all_rows, GROUPS: tl.constexpr):
    """The scales (or zeros) of the groups of one block, as a tuple of GROUPS vectors over the rows."""
    values = ()
    for group in tl.static_range(GROUPS):
        value = tl.load(values_ptr + (GROUPS * block + group) * all_rows + row).to(tl.float32)
        values = values + (value,)  # type: ignore[assignment] # noqa: RUF005, Triton compiles no starred expressions
    return values


@triton.jit
def load_low_and_high(words_ptr, BITS: tl.constexpr):
    """The words of a block's rows; of 3 bits also those with the high bits, shifted to where they are read."""
    word = tl.arange(0, 32)[None, :]
    low = tl.load(words_ptr + word)
    if BITS == 3:
        return low, tl.load(words_ptr + 32 + word // 2) >> (word % 2 * 8)
    return low, low


@triton.jit
def with_zero(part, sums, zero, HAS_ZEROS: tl.constexpr, BITS: tl.constexpr):
    """Turn a group's product with codes less the middle into that with codes less their zero."""
    if HAS_ZEROS:
        part -= sums * (zero - (8.0 if BITS == 4 else 4.0))[:, None]
    return part


@triton.jit
def tile_product(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr,
    row, token, first, last, tokens, inputs, all_rows,
    BITS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Σ over blocks first … last − 1 of Ŵ[row, block] · x[token, block]ᵀ, (ROWS, TOKENS) in float32.

    Zeros that differ by row would have to reach the threads that hold the weights, through shared memory. Instead the
    activations of a group are summed, by the tensor core, which has time, and the zero's share is taken off.

    RAGGED: the inputs do not fill the last block.
    """
    STEPS: tl.constexpr = 4 if BITS == 4 else 8
    GROUPS: tl.constexpr = STEPS // 2 if GROUPED else 1
    BLOCK_WORDS: tl.constexpr = 32 if BITS == 4 else 48
    column = tl.arange(0, 64)
    token_mask = token[None, :] < tokens
    words_ptr = qweight_ptr + first * all_rows * BLOCK_WORDS + row[:, None] * BLOCK_WORDS
    x_tile_ptr = x_ptr + token[None, :].to(tl.int64) * inputs + first * 64 * STEPS + column[:, None]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    sums = tl.zeros((ROWS, TOKENS), tl.float32)
    ones = tl.full((ROWS, 64), 1.0, DOT)
    at = first if GROUPED else 0
    scales = load_groups(scales_ptr, at, row, all_rows, GROUPS)
    zeros = load_groups(zeros_ptr, at, row, all_rows, GROUPS if HAS_ZEROS else 0)
    for block in tl.range(first, last, num_stages=STAGES):
        low, high = load_low_and_high(words_ptr, BITS)
        # Scales of the next block are loaded while this one is multiplied: they do not use shared memory.
        now, zeros_now = scales, zeros
        if GROUPED:
            following = tl.minimum(block + 1, last - 1)
            scales = load_groups(scales_ptr, following, row, all_rows, GROUPS)
            zeros = load_groups(zeros_ptr, following, row, all_rows, GROUPS if HAS_ZEROS else 0)
        part = tl.zeros((ROWS, TOKENS), tl.float32)
        if GROUPED:
            sums = tl.zeros((ROWS, TOKENS), tl.float32)
        for step in tl.static_range(STEPS):
            weight = less_middle(low, high, step, BITS, ROWS, DOT)
            mask = token_mask
            if RAGGED:
                mask = token_mask & (block * 64 * STEPS + step * 64 + column[:, None] < inputs)
            x = tl.load(x_tile_ptr + step * 64, mask=mask, other=0.0).to(DOT)
            part = tl.dot(weight, x, part, input_precision="ieee")
            if HAS_ZEROS:
                sums = tl.dot(ones, x, sums, input_precision="ieee")
            if GROUPED and step % 2 == 1:
                zero = zeros_now[step // 2] if HAS_ZEROS else 0
                total += with_zero(part, sums, zero, HAS_ZEROS, BITS) * now[step // 2][:, None]
                part = tl.zeros((ROWS, TOKENS), tl.float32)
                sums = tl.zeros((ROWS, TOKENS), tl.float32)
        if not GROUPED:
            total += part
        words_ptr += all_rows * BLOCK_WORDS
        x_tile_ptr += 64 * STEPS
    if not GROUPED:
        zero = zeros[0] if HAS_ZEROS else 0
        total = with_zero(total, sums, zero, HAS_ZEROS, BITS) * scales[0][:, None]
    return total


@triton.jit
def is_last_to_arrive(counter_ptr, count):
    """Counts this program's arrival; true in the last of `count` programs, which resets the counter.

    The last program sees all that the others stored before.
    """
    tl.debug_barrier()  # all threads of the program have stored
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def gather_parts(total, parts_ptr, arrivals_ptr, tile, part, row, token, tokens, all_rows, SPLIT: tl.constexpr):
    """Stores this program's part, (rows, tokens), in `parts`, (SPLIT, tokens, all_rows); the last program adds them up.

    Parts are added in their order, so that the sum does not depend on which program is last.

    Returns:
        The sum (in the last program only), and whether this program is the last of its tile.
    """
    mask = (row[:, None] >= 0) & (token[None, :] < tokens)
    place_ptr = parts_ptr + token[None, :].to(tl.int64) * all_rows + row[:, None]
    stride = tokens.to(tl.int64) * all_rows
    tl.store(place_ptr + part * stride, total, mask=mask)
    last = is_last_to_arrive(arrivals_ptr + tile, SPLIT)
    if last:
        total = tl.zeros_like(total)
        for split in range(SPLIT):
            # Past the first-level cache, which does not see what other multiprocessors write.
            total += tl.load(place_ptr + split * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total, last


@triton.jit
def store_tile(y_ptr, total, row, token, outputs, mask):
    """Stores a tile of y, (rows, tokens), into (tokens, outputs), in y's type, where `mask`."""
    place_ptr = y_ptr + token[None, :].to(tl.int64) * outputs + row[:, None]
    tl.store(place_ptr, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def w4_gemm_kernel(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr, y_ptr, parts_ptr, arrivals_ptr,
    tokens, outputs, inputs, all_rows, blocks,
    BITS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of y and a share of its inputs. Programs of a tile's tokens are neighbours: they read the same weights."""
    token_tiles = tl.cdiv(tokens, TOKENS)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    row = tile // token_tiles * ROWS + tl.arange(0, ROWS)
    token = tile % token_tiles * TOKENS + tl.arange(0, TOKENS)
    total = tile_product(
        x_ptr, qweight_ptr, scales_ptr, zeros_ptr, row, token, part * blocks // SPLIT, (part + 1) * blocks // SPLIT,
        tokens, inputs, all_rows, BITS, GROUPED, HAS_ZEROS, RAGGED, ROWS, TOKENS, STAGES, DOT,
    )  # fmt: skip
    mask = (row[:, None] < outputs) & (token[None, :] < tokens)
    if SPLIT > 1:
        total, last = gather_parts(total, parts_ptr, arrivals_ptr, tile, part, row, token, tokens, all_rows, SPLIT)
        mask = mask & last
    store_tile(y_ptr, total, row, token, outputs, mask)


@triton.jit
def unpack_kernel(
    qweight_ptr, scales_ptr, zeros_ptr, weight_ptr,
    outputs, inputs, all_rows,
    BITS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Ŵ, (outputs, inputs): a block of ROWS rows."""
    STEPS: tl.constexpr = 4 if BITS == 4 else 8
    BLOCK_WORDS: tl.constexpr = 32 if BITS == 4 else 48
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 64)
    words_ptr = qweight_ptr + block * all_rows * BLOCK_WORDS + row[:, None] * BLOCK_WORDS
    low, high = load_low_and_high(words_ptr, BITS)
    for step in tl.static_range(STEPS):
        group = block * (STEPS // 2) + step // 2 if GROUPED else 0
        zero = 0.0
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + group * all_rows + row).to(tl.float32)[:, None] - (8.0 if BITS == 4 else 4.0)
        scale = tl.load(scales_ptr + group * all_rows + row).to(tl.float32)[:, None]
        weight = (less_middle(low, high, step, BITS, ROWS, tl.float32) - zero) * scale
        at = block * 64 * STEPS + step * 64 + column
        mask = (row[:, None] < outputs) & (at[None, :] < inputs)
        place_ptr = weight_ptr + row[:, None].to(tl.int64) * inputs + at[None, :]
        tl.store(place_ptr, weight.to(weight_ptr.dtype.element_ty), mask=mask)


def w4_gemm(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Compute `reference.w4_gemm`; x contiguous. Ŵ is rounded to x's type if it is unpacked."""
    assert x.is_contiguous(), "rows must follow one another"
    tokens = x.numel() // weight.inputs
    if unpacks(tokens, weight):
        return torch.nn.functional.linear(x, unpack(weight, x.dtype))
    y = x.new_empty(*x.shape[:-1], weight.outputs)
    if tokens:
        launch(x, weight, y, tiling_of(tokens, weight))
    return y


def tiling_of(tokens: int, weight: PackedWeight) -> Tiling:
    """The tiling of a product."""
    return select(tokens, weight.outputs, weight.qweight.shape[0], weight.bits, weight.zeros is not None)


def unpacks(tokens: int, weight: PackedWeight) -> bool:
    """True if Ŵ is unpacked for so many tokens."""
    return tokens >= (UNPACK_TOKENS if weight.zeros is None else UNPACK_TOKENS_WITH_ZEROS)


def unpack(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """See `pack.dequantise`."""
    blocks, rows, _ = weight.qweight.shape
    dense = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.qweight.device)
    unpack_kernel[(blocks, rows // 32)](
        weight.qweight, weight.scales, weight.scales if weight.zeros is None else weight.zeros, dense, weight.outputs,
        weight.inputs, rows, BITS=weight.bits, GROUPED=weight.group == GROUP, HAS_ZEROS=weight.zeros is not None,
        ROWS=32, num_warps=4,
    )  # fmt: skip
    return dense


def launch(x: torch.Tensor, weight: PackedWeight, y: torch.Tensor, tiling: Tiling) -> None:
    """Launch the tile kernel, y = x · Ŵᵀ."""
    blocks, rows, _ = weight.qweight.shape
    tokens = x.numel() // weight.inputs
    tiles = triton.cdiv(weight.outputs, tiling.rows) * triton.cdiv(tokens, tiling.tokens)
    w4_gemm_kernel[(tiles * tiling.split,)](
        x, weight.qweight, weight.scales, weight.scales if weight.zeros is None else weight.zeros, y,
        parts_of(x, tokens, rows, tiling.split), weight.arrivals, tokens, weight.outputs, weight.inputs, rows, blocks,
        **constants(x.dtype, weight.bits, weight.group, weight.zeros is not None, weight.inputs, tiling),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


def parts_of(x: torch.Tensor, tokens: int, rows: int, split: int) -> torch.Tensor:
    """Memory for the programs' parts; empty if inputs are not split."""
    size = split * tokens * rows if split > 1 else 1
    return torch.empty(size, dtype=torch.float32, device=x.device)


def constants(
    dtype: torch.dtype, bits: int, group: int, has_zeros: bool, inputs: int, tiling: Tiling
) -> dict[str, object]:
    """The kernel's constants."""
    return {
        "BITS": bits, "GROUPED": group == GROUP, "HAS_ZEROS": has_zeros, "RAGGED": inputs % (SPAN * STEPS[bits]) != 0,
        "ROWS": tiling.rows, "TOKENS": tiling.tokens, "SPLIT": tiling.split, "STAGES": tiling.num_stages,
        "DOT": dot_type(dtype),
    }  # fmt: skip


def _shipped(dtype: torch.dtype, bits: int, group: int, has_zeros: bool, tokens: int, inputs: int) -> Shipped:
    tiling = select(tokens, 4096, -(-inputs // (SPAN * STEPS[bits])), bits, has_zeros)
    name = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    zeros = "*u8" if has_zeros else "*fp16"
    return Shipped(
        w4_gemm_kernel, f"{name} *i32 *fp16 {zeros} {name} *fp32 *i32 i32 i32 i32 i32 i32",
        constants(dtype, bits, group, has_zeros, inputs, tiling), num_warps=tiling.num_warps,
        num_stages=tiling.num_stages, aligned=("outputs", "inputs", "all_rows"),
    )  # fmt: skip


assert WORDS == 32, "the kernels are written for 32 words"

SHIPPED = [
    *(
        _shipped(torch.bfloat16, bits, group, zeros, tokens, 4096)
        for bits, group, zeros in ((4, 128, False), (4, 0, False), (4, 128, True), (3, 128, False))
        for tokens in ((1, 64) if zeros else (1, 32, 64, 128) if bits == 4 else (1, 128))
    ),
    *(_shipped(torch.float16, 4, 128, False, tokens, 4096) for tokens in (1, 128)),
    _shipped(torch.bfloat16, 3, 128, False, 1, 11008),
    *(
        Shipped(
            unpack_kernel,
            "*i32 *fp16 *fp16 *bf16 i32 i32 i32",
            {"BITS": bits, "GROUPED": True, "HAS_ZEROS": False, "ROWS": 32},
            aligned=("outputs", "inputs", "all_rows"),
        )
        for bits in (4, 3)
    ),
]
