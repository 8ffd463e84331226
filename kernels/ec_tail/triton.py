"""The tail of a compensated row-parallel product in one launch.

Each program computes 256 outputs of 16 tokens, so that even for one token, B and the peers' buffers are read by 16
multiprocessors at a hidden size of 4096. Each program evaluates the gate itself, with weights in the second-level
cache, instead of waiting for another program's result. The last program of a tile of tokens to arrive sees the sums of
squares of all and normalises the rows, which are in the cache. Peers are summed in the order of their ranks, so that
every rank computes the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.error_compensator.factors import Compensator
from kernels.error_compensator.triton import FIRST_SHARE, add_latent_product, gated, hidden_tile
from kernels.shipping import Shipped, dot_type
from kernels.w4_gemm.triton import is_last_to_arrive

TOKENS = 16


def columns_for(rank: int) -> int:
    """Outputs of a program: B's rows and the sum's are in registers, which 8192 numbers of B fill."""
    return max(64, min(256, 8192 // rank))


@triton.jit
def sum_over_ranks(buffer_ptr, stride, place, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr):
    """Σ over ranks, in their order; all loads are in flight at once."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for rank in tl.static_range(RANKS):
        # Past the first-level cache: other GPUs write here.
        total += tl.load(buffer_ptr + rank * stride + place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit(do_not_specialize=["tokens"])
def ec_tail_kernel(
    outputs_ptr, latents_ptr, residual_ptr, weight_ptr, up_ptr, up_scales_ptr, first_ptr, first_bias_ptr, second_ptr,
    second_bias_ptr, y_ptr, total_ptr, wide_ptr, squares_ptr, counters_ptr,
    alpha, epsilon, tokens, hidden,
    RANKS: tl.constexpr, RANK: tl.constexpr, HIDDEN: tl.constexpr,
    HIDDEN_TILE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(COLUMNS, TOKENS) of the sum; then, if it is the last of its tokens, all of their rows' norm.

    wide: (tokens, hidden) and squares: (tiles of columns, tokens), float32, where programs leave what the last reads.
    HIDDEN: the gate's width, which is no relation of `hidden`.
    """
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    latent = tl.arange(0, RANK)
    here = token[None, :] < tokens
    mask = here & (column[:, None] < hidden)
    place = token[None, :].to(tl.int64) * hidden + column[:, None]
    up = tl.load(up_ptr + column[:, None] * RANK + latent[None, :], mask=column[:, None] < hidden, other=0)
    total = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    stride = tokens.to(tl.int64)
    total += sum_over_ranks(outputs_ptr, stride * hidden, place, mask, COLUMNS, TOKENS, RANKS)
    latent_place = token[None, :].to(tl.int64) * RANK + latent[:, None]
    near = here & (latent[:, None] < RANK)
    z = sum_over_ranks(latents_ptr, stride * RANK, latent_place, near, RANK, TOKENS, RANKS)
    gate = (first_ptr, first_bias_ptr, second_ptr, second_bias_ptr)
    z = alpha * gated(z, gate, RANK, TOKENS, HIDDEN, HIDDEN_TILE)
    up_scales = tl.load(up_scales_ptr + column, mask=column < hidden, other=0.0)
    total = add_latent_product(total, up, up_scales, z, DOT)
    tl.store(total_ptr + place, total.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(wide_ptr + place, total, mask=mask)
    squares = tl.sum(tl.where(mask, total * total, 0.0), axis=0)
    tl.store(squares_ptr + tl.program_id(0) * tokens + token, squares, mask=token < tokens)
    if is_last_to_arrive(counters_ptr + FIRST_SHARE + tl.program_id(1), tl.num_programs(0)):
        squares = tl.zeros_like(squares)
        for program in range(tl.num_programs(0)):
            squares += tl.load(
                squares_ptr + program * tokens + token, mask=token < tokens, other=0.0, cache_modifier=".cg"
            )
        scale = tl.rsqrt(squares / hidden + epsilon)
        for start in range(0, hidden, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            mask = here & (column[:, None] < hidden)
            place = token[None, :].to(tl.int64) * hidden + column[:, None]
            total = tl.load(wide_ptr + place, mask=mask, other=0.0, cache_modifier=".cg")
            weight = tl.load(weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
            y = total * scale[None, :] * weight[:, None]
            tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def ec_tail(
    outputs: torch.Tensor,
    latents: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    compensator: Compensator,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.ec_tail`; all contiguous, latents float32."""
    assert outputs.is_contiguous(), "ranks' buffers must follow one another"
    assert latents.is_contiguous(), "ranks' buffers must follow one another"
    assert latents.dtype == torch.float32, "latents are staged unrounded"
    assert residual.is_contiguous(), "rows must follow one another"
    tokens, hidden = residual.shape
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    if not tokens:
        return y, total
    tiles = triton.cdiv(hidden, columns_for(compensator.rank))
    wide = torch.empty(tokens, hidden, dtype=torch.float32, device=residual.device)
    squares = torch.empty(tiles, tokens, dtype=torch.float32, device=residual.device)
    ec_tail_kernel[(tiles, triton.cdiv(tokens, TOKENS))](
        outputs, latents, residual, weight, compensator.up, compensator.up_scales, compensator.first,
        compensator.first_bias, compensator.second, compensator.second_bias, y, total, wide, squares,
        compensator.arrivals, compensator.alpha, epsilon, tokens, hidden, RANKS=outputs.shape[0],
        **_constants(compensator.rank, compensator.first.shape[0], residual.dtype),
        num_warps=8,
    )  # fmt: skip
    return y, total


def _constants(rank: int, gate_width: int, dtype: torch.dtype) -> dict[str, object]:
    return {
        "RANK": rank, "HIDDEN": gate_width, "HIDDEN_TILE": hidden_tile(rank, gate_width), "TOKENS": TOKENS,
        "COLUMNS": columns_for(rank), "DOT": dot_type(dtype),
    }  # fmt: skip


SHIPPED = [
    Shipped(
        ec_tail_kernel,
        "*bf16 *fp32 *bf16 *bf16 *i8 *fp32 *fp16 *fp16 *fp16 *fp16 *bf16 *bf16 *fp32 *fp32 *i32 fp32 fp32 i32 i32",
        {"RANKS": ranks, **_constants(rank, 4 * rank, torch.bfloat16)},
        num_warps=8,
        aligned=("hidden",),
    )
    for ranks, rank in ((2, 32), (4, 32), (8, 32), (4, 64), (4, 128))
]
