"""Mixtures of experts: routing, tokens sorted by expert, two grouped products, and the weighted sum.

An assignment is a token with one of its experts: number token · chosen + place. Assignments are sorted by expert, and
each expert's are cut into tiles. The number of tiles is known on the GPU only, so products are launched for the largest
possible number, and programs without a tile end at once. Nothing waits for the host, and the launches depend on shapes
alone, so that a graph can hold them.

As in `w4_gemm`, weights are the left operand: a warpgroup multiplies 64 rows of weights at once, and tokens, of which
an expert has few, are the columns, 16 at least. With one token the bytes of its experts' weights are everything:
(8 experts of 768 · 2048 · 3 weights: 75 MB); 96 programs, each with 48 KB of weights on their way, ask for more at
once than latency times bandwidth. With many tokens a tile of 128 tokens and 128 rows is bound by the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped, dot_type

ROUTE_TOKENS = 4
SORT_CHUNKS = 256, 1024
"""Assignments that one program sorts, at least where there are more, and at most."""

COMBINE_COLUMNS = 512


@dataclass(frozen=True)
class Tiling:
    """The launch of a grouped product: rows of weights, tokens, and inputs of a tile; warps and stages."""

    rows: int
    tokens: int
    inputs: int
    num_warps: int
    num_stages: int


def select(assignments: int, experts: int) -> Tiling:
    """The tiling for this many assignments: tiles of tokens as large as an expert has on average, from 16 to 128."""
    average = -(-assignments // experts)
    tokens = max(16, min(128, triton.next_power_of_2(average)))
    if tokens <= 32:
        return Tiling(rows=64, tokens=tokens, inputs=64, num_warps=4, num_stages=4)
    if tokens == 64:
        return Tiling(rows=64, tokens=64, inputs=64, num_warps=4, num_stages=3)
    return Tiling(rows=128, tokens=128, inputs=64, num_warps=8, num_stages=3)


def most_tiles(assignments: int, experts: int, tile: int) -> int:
    """An upper bound on Σ ⌈count / tile⌉: an expert leaves at most tile − 1 places of its last tile empty."""
    return (assignments + min(experts, assignments) * (tile - 1)) // tile


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr, weights_ptr, experts_ptr,
    tokens, experts,
    CHOSEN: tl.constexpr, PLACES: tl.constexpr, RENORMALISE: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Softmax over the experts and its CHOSEN largest, for TOKENS tokens. EXPERTS, PLACES: powers of two."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    mask = (token < tokens) & (expert < experts)
    logits = tl.load(logits_ptr + token * experts + expert, mask=mask, other=float("-inf")).to(tl.float32)
    logits = tl.where(token < tokens, logits, 0.0)  # rows that are not there must not divide by zero
    largest = tl.max(logits, axis=1)[:, None]
    total = tl.sum(tl.exp(logits - largest), axis=1)[:, None]
    weights = tl.zeros((TOKENS, PLACES), tl.float32)
    numbers = tl.zeros((TOKENS, PLACES), tl.int32)
    for j in range(CHOSEN):
        best = tl.max(logits, axis=1)[:, None]
        number = tl.argmax(logits, axis=1, tie_break_left=True)[:, None]
        weights = tl.where(place == j, tl.exp(best - largest) / total, weights)
        numbers = tl.where(place == j, number, numbers)
        logits = tl.where(expert == number, float("-inf"), logits)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    here = (token < tokens) & (place < CHOSEN)
    tl.store(weights_ptr + token * CHOSEN + place, weights, mask=here)
    tl.store(experts_ptr + token * CHOSEN + place, numbers, mask=here)


@triton.jit(do_not_specialize=["assignments"])
def count_kernel(experts_ptr, counts_ptr, assignments, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    """The number of each expert's assignments in one chunk, (chunks, EXPERTS)."""
    chunk = tl.program_id(0)
    assignment = chunk * CHUNK + tl.arange(0, CHUNK)
    there = assignment < assignments
    counts = tl.histogram(tl.load(experts_ptr + assignment, mask=there, other=0), EXPERTS, mask=there)
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["assignments", "tiles"])
def sort_kernel(
    experts_ptr, counts_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr,
    assignments, tiles,
    TILE: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, COUNTED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The assignments of one chunk in the order of all; and a share of the tiles.

    An expert's assignments lie behind those of the experts before it, and in their own order. The tables of tiles have
    room for the largest possible number; unused entries have expert −1. Not COUNTED: there is one chunk.
    """
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    within = tl.arange(0, CHUNK)
    there = chunk * CHUNK + within < assignments
    numbers = tl.load(experts_ptr + chunk * CHUNK + within, mask=there, other=EXPERTS)
    earlier = tl.zeros((EXPERTS,), tl.int32)
    if COUNTED:
        counts = tl.load(counts_ptr + chunk * EXPERTS + expert)
        totals = tl.zeros((EXPERTS,), tl.int32)
        for first in range(0, tl.num_programs(0), AT_ONCE):
            row = first + tl.arange(0, AT_ONCE)[:, None]
            part = tl.load(counts_ptr + row * EXPERTS + expert[None, :], mask=row < tl.num_programs(0), other=0)
            totals += tl.sum(part, axis=0)
            earlier += tl.sum(tl.where(row < chunk, part, 0), axis=0)
    else:
        counts = tl.histogram(tl.where(there, numbers, 0), EXPERTS, mask=there)
        totals = counts
    begins = tl.cumsum(totals, axis=0) - totals
    places = begins + earlier - (tl.cumsum(counts, axis=0) - counts)
    keys = tl.sort(numbers * CHUNK + within)
    number = keys // CHUNK
    place = tl.gather(places, tl.minimum(number, EXPERTS - 1), 0) + within
    tl.store(order_ptr + place, chunk * CHUNK + keys % CHUNK, mask=number < EXPERTS)
    tile_counts = tl.cdiv(totals, TILE)
    tile_ends = tl.cumsum(tile_counts, axis=0)
    for first in range(chunk * AT_ONCE, tiles, tl.num_programs(0) * AT_ONCE):
        tile = first + tl.arange(0, AT_ONCE)
        owner = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        index = tl.minimum(owner, EXPERTS - 1)
        begin = tl.gather(begins, index, 0)
        first_tile = tl.gather(tile_ends - tile_counts, index, 0)
        tl.store(tile_expert_ptr + tile, tl.where(owner < EXPERTS, owner, -1), mask=tile < tiles)
        tl.store(tile_first_ptr + tile, begin + (tile - first_tile) * TILE, mask=tile < tiles)
        tl.store(tile_end_ptr + tile, begin + tl.gather(totals, index, 0), mask=tile < tiles)


@triton.jit
def weight_tile(base_ptr, row, start, rows, inputs, INPUTS: tl.constexpr, RAGGED: tl.constexpr, DOT: tl.constexpr):
    """(rows, INPUTS) of an expert's weights. Rows behind the last are read as the last, and no program stores them."""
    column = start + tl.arange(0, INPUTS)
    place_ptr = base_ptr + tl.minimum(row, rows - 1)[:, None] * inputs + column[None, :]
    if RAGGED:
        return tl.load(place_ptr, mask=column[None, :] < inputs, other=0.0).to(DOT)
    return tl.load(place_ptr).to(DOT)


@triton.jit
def token_tile(x_ptr, source, start, row_mask, inputs, INPUTS: tl.constexpr, RAGGED: tl.constexpr, DOT: tl.constexpr):
    """(INPUTS, tokens) of the rows `source` of x."""
    column = start + tl.arange(0, INPUTS)
    mask = row_mask[None, :]
    if RAGGED:
        mask = mask & (column[:, None] < inputs)
    return tl.load(x_ptr + source[None, :] * inputs + column[:, None], mask=mask, other=0.0).to(DOT)


@triton.jit
def gate_up_kernel(
    x_ptr, weights_ptr, hidden_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr,
    inputs, intermediate,
    CHOSEN: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """silu(gate x) ⊙ (up x) of a tile of assignments: ROWS rows of gate and the same of up. Left in sorted order."""
    row_tiles = tl.cdiv(intermediate, ROWS)
    tile = tl.program_id(0) // row_tiles
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
        place = tl.load(tile_first_ptr + tile) + tl.arange(0, TOKENS)
        token_mask = place < tl.load(tile_end_ptr + tile)
        token = (tl.load(order_ptr + place, mask=token_mask, other=0) // CHOSEN).to(tl.int64)
        gate_ptr = weights_ptr + expert * 2 * intermediate * inputs
        up_ptr = gate_ptr + intermediate.to(tl.int64) * inputs
        gate = tl.zeros((ROWS, TOKENS), tl.float32)
        up = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, inputs, INPUTS, num_stages=STAGES):
            x = token_tile(x_ptr, token, start, token_mask, inputs, INPUTS, RAGGED, DOT)
            weight = weight_tile(gate_ptr, row, start, intermediate, inputs, INPUTS, RAGGED, DOT)
            gate = tl.dot(weight, x, gate, input_precision="ieee")
            weight = weight_tile(up_ptr, row, start, intermediate, inputs, INPUTS, RAGGED, DOT)
            up = tl.dot(weight, x, up, input_precision="ieee")
        activated = gate * tl.sigmoid(gate) * up
        here = token_mask[None, :] & (row[:, None] < intermediate)
        place_ptr = hidden_ptr + place[None, :].to(tl.int64) * intermediate + row[:, None]
        tl.store(place_ptr, activated.to(hidden_ptr.dtype.element_ty), mask=here)


@triton.jit
def down_kernel(
    hidden_ptr, weights_ptr, made_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr,
    inputs, outputs,
    RAGGED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """down · hidden of a tile of assignments, from sorted order back to the assignments'."""
    row_tiles = tl.cdiv(outputs, ROWS)
    tile = tl.program_id(0) // row_tiles
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    if expert >= 0:
        row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
        place = tl.load(tile_first_ptr + tile) + tl.arange(0, TOKENS)
        token_mask = place < tl.load(tile_end_ptr + tile)
        assignment = tl.load(order_ptr + place, mask=token_mask, other=0).to(tl.int64)
        own_ptr = weights_ptr + expert * outputs * inputs
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, inputs, INPUTS, num_stages=STAGES):
            x = token_tile(hidden_ptr, place.to(tl.int64), start, token_mask, inputs, INPUTS, RAGGED, DOT)
            weight = weight_tile(own_ptr, row, start, outputs, inputs, INPUTS, RAGGED, DOT)
            total = tl.dot(weight, x, total, input_precision="ieee")
        here = token_mask[None, :] & (row[:, None] < outputs)
        place_ptr = made_ptr + assignment[None, :] * outputs + row[:, None]
        tl.store(place_ptr, total.to(made_ptr.dtype.element_ty), mask=here)


@triton.jit
def combine_kernel(made_ptr, weights_ptr, y_ptr, hidden, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):
    """The weighted sum of the outputs of a token's experts, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(CHOSEN):
        weight = tl.load(weights_ptr + token * CHOSEN + j).to(tl.float32)
        output = tl.load(made_ptr + (token * CHOSEN + j) * hidden + column, mask=inside, other=0.0)
        total += weight * output.to(tl.float32)
    tl.store(y_ptr + token * hidden + column, total.to(y_ptr.dtype.element_ty), mask=inside)


def route(logits: torch.Tensor, top_k: int, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.route`; logits contiguous, weights in float32."""
    assert logits.is_contiguous(), "rows must follow one another"
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    numbers = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        route_kernel[(triton.cdiv(tokens, ROUTE_TOKENS),)](
            logits, weights, numbers, tokens, experts, CHOSEN=top_k, PLACES=triton.next_power_of_2(top_k),
            RENORMALISE=renormalise, TOKENS=ROUTE_TOKENS, EXPERTS=triton.next_power_of_2(experts),
            num_warps=ROUTE_TOKENS,
        )  # fmt: skip
    return weights, numbers


@dataclass(frozen=True)
class Sorted:
    """Assignments by expert.

    Attributes:
        order: (assignments,) int32, the numbers of the assignments.
        tile_expert: (tiles,) int32, −1 where there is no tile. tile_first, tile_end: of the tile's expert, places in
            the order from which on the tile lies, and at which its expert ends.
    """

    order: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor
    tile_end: torch.Tensor


def sort_by_expert(numbers: torch.Tensor, experts: int, tile: int) -> Sorted:
    """Sort assignments by expert, in tiles of `tile`; their experts' numbers are given (contiguous, int32)."""
    assignments = numbers.numel()
    tiles = most_tiles(assignments, experts, tile)
    order, *tables = (
        torch.empty(size, dtype=torch.int32, device=numbers.device) for size in (assignments, tiles, tiles, tiles)
    )
    sizes = _sort_sizes(assignments, experts)
    chunks = triton.cdiv(assignments, sizes["CHUNK"])
    counts = torch.empty(chunks, sizes["EXPERTS"], dtype=torch.int32, device=numbers.device)
    if chunks > 1:
        count_kernel[(chunks,)](numbers, counts, assignments, **sizes, num_warps=4)
    sort_kernel[(chunks,)](
        numbers, counts, order, *tables, assignments, tiles, TILE=tile, **sizes, COUNTED=chunks > 1, AT_ONCE=16,
        num_warps=4,
    )  # fmt: skip
    return Sorted(order, *tables)


def _sort_sizes(assignments: int, experts: int) -> dict[str, int]:
    """Few assignments are one chunk, which needs no counts of others; many are 64 chunks or, above 65,536, more."""
    least, most = SORT_CHUNKS
    chunk = max(min(least, triton.next_power_of_2(assignments)), min(most, triton.next_power_of_2(assignments // 64)))
    return {"EXPERTS": max(16, triton.next_power_of_2(experts)), "CHUNK": max(16, chunk)}


def expert_mlp(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute `reference.expert_mlp`, all contiguous; what the two products make is rounded to x's type."""
    assert all(tensor.is_contiguous() for tensor in (x, weights, experts, gate_up, down)), (
        "rows must follow one another"
    )
    (tokens, hidden), top_k = x.shape, experts.shape[1]
    count, intermediate = down.shape[0], down.shape[2]
    y = torch.empty_like(x)
    if not tokens:
        return y
    tiling = select(tokens * top_k, count)
    by_expert = sort_by_expert(experts, count, tiling.tokens)
    tables = (by_expert.order, by_expert.tile_expert, by_expert.tile_first, by_expert.tile_end)
    tiles = by_expert.tile_expert.shape[0]
    inner, products = x.new_empty(tokens * top_k, intermediate), x.new_empty(tokens * top_k, hidden)
    gate_up_kernel[(tiles * triton.cdiv(intermediate, tiling.rows),)](
        x, gate_up, inner, *tables, hidden, intermediate, CHOSEN=top_k, **_constants(hidden, x.dtype, tiling),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    down_kernel[(tiles * triton.cdiv(hidden, tiling.rows),)](
        inner, down, products, *tables, intermediate, hidden, **_constants(intermediate, x.dtype, tiling),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    combine_kernel[(tokens, triton.cdiv(hidden, COMBINE_COLUMNS))](
        products, weights, y, hidden, CHOSEN=top_k, COLUMNS=COMBINE_COLUMNS, num_warps=2
    )
    return y


def _constants(inputs: int, dtype: torch.dtype, tiling: Tiling) -> dict[str, object]:
    return {
        "RAGGED": inputs % tiling.inputs != 0, "ROWS": tiling.rows, "TOKENS": tiling.tokens, "INPUTS": tiling.inputs,
        "STAGES": tiling.num_stages, "DOT": dot_type(dtype),
    }  # fmt: skip


def _shipped_products(assignments: int, name: str, dtype: torch.dtype) -> list[Shipped]:
    """The products of Qwen3-30B-A3B: 128 experts, 8 a token, 2048 inputs, an intermediate size of 768."""
    tiling = select(assignments, 128)
    shared = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    types = f"{name} {name} {name} *i32 *i32 *i32 *i32 i32 i32"
    constants = _constants(2048, dtype, tiling)
    return [
        Shipped(gate_up_kernel, types, {"CHOSEN": 8, **constants}, aligned=("inputs", "intermediate"), **shared),
        Shipped(down_kernel, types, constants, aligned=("inputs", "outputs"), **shared),
    ]


SHIPPED = [
    Shipped(
        route_kernel,
        "*bf16 *fp32 *i32 i32 i32",
        {"CHOSEN": 8, "PLACES": 8, "RENORMALISE": True, "TOKENS": ROUTE_TOKENS, "EXPERTS": 128},
        num_warps=ROUTE_TOKENS,
        aligned=("experts",),
    ),
    Shipped(count_kernel, "*i32 *i32 i32", _sort_sizes(65536, 128)),
    *(
        Shipped(
            sort_kernel,
            "*i32 *i32 *i32 *i32 *i32 *i32 i32 i32",
            {"TILE": tile, **_sort_sizes(assignments, 128), "COUNTED": counted, "AT_ONCE": 16},
        )
        for assignments, tile, counted in ((8, 16, False), (256, 16, False), (1024, 16, True), (65536, 128, True))
    ),
    *(
        configuration
        for assignments in (8, 4096, 8192, 65536)
        for configuration in _shipped_products(assignments, "*bf16", torch.bfloat16)
    ),
    *_shipped_products(8, "*fp16", torch.float16),
    Shipped(
        combine_kernel,
        "*bf16 *fp32 *bf16 i32",
        {"CHOSEN": 8, "COLUMNS": COMBINE_COLUMNS},
        num_warps=2,
        aligned=("hidden",),
    ),
]
