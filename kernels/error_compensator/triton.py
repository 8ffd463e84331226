"""The compensated product, for few tokens in one launch and for many in two streams.

**Few tokens.** Reading Ŵ takes nearly all the time, and a second launch would take longer than its computation. So the
first programs of the W4 launch compute Ax, each a share of the inputs. The last of them to arrive adds up the shares,
evaluates the gate once, stores α · γ ⊙ Ax and raises a flag. The other programs are tiles of the W4 product. The last
to arrive at a tile waits for the flag, adds the product of B's rows and the stored latent, and writes the tile once.

A program waits only for programs with lower numbers, which a GPU starts first, and those wait for none: there is always
one that can go on. The interpreter, which runs one program after another, never waits. Counters and the flag are reset
by the last program that needs them, so the launch can be repeated in a graph.

**Many tokens.** The product saturates the tensor cores, and programs that wait would hold them up. Ax and the gate run
on a second stream beside it; both meet in a kernel that adds B. Where Ŵ is unpacked first, B is multiplied beside that,
and the library's product adds to the correction in its epilogue (β = 1). The streams fork and join by events: a graph
that captures them has two branches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.error_compensator.factors import HIDDEN_PADDING, Compensator
from kernels.shipping import Shipped, dot_type
from kernels.w4_gemm import triton as w4
from kernels.w4_gemm.pack import GROUP, SPAN, STEPS, PackedWeight

FLAG, DONE, FIRST_SHARE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Places in a compensator's counters: the flag, tiles that are done, shares of Ax by tile of tokens."""

INPUT_TILE = 128
"""Inputs of A multiplied at once: 128 bytes of a row."""

MOST_SHARES = 16


def shares(inputs: int, token_tiles: int = 1) -> int:
    """Programs that compute Ax for a tile of tokens: 512 inputs each, to be done long before the W4 tiles are."""
    return max(1, min(MOST_SHARES, inputs // 512, 64 // token_tiles))


def latent_tokens(rank: int) -> int:
    """Tokens of a tile of Ax at most: above a rank of 64 more than 32 would spill."""
    return 64 if rank <= 64 else 32


def hidden_tile(rank: int, hidden: int) -> int:
    """Hidden coordinates of the gate at once: at rank 32 all of them; above it few, or fewer than 4 programs fit on a
    multiprocessor, whose registers the gate would take."""
    tile = 128 if rank <= 32 else 32
    return tile if hidden % tile == 0 else HIDDEN_PADDING


@triton.jit
def tanh(x):
    """tanh from the logistic function, which the interpreter has, too."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def gated(z, gate, RANK: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_TILE: tl.constexpr):
    """γ(z) ⊙ z for z (RANK, TOKENS). Tensor cores round z to 11 bits for the gate's argument (tf32).

    `gate`: pointers to W₁, b₁, W₂ and b₂.
    """
    first_ptr, first_bias_ptr, second_ptr, second_bias_ptr = gate
    latent = tl.arange(0, RANK)
    logits = tl.zeros((RANK, TOKENS), tl.float32) + tl.load(second_bias_ptr + latent).to(tl.float32)[:, None]
    for start in range(0, HIDDEN, HIDDEN_TILE):
        hidden = start + tl.arange(0, HIDDEN_TILE)
        first = tl.load(first_ptr + hidden[:, None] * RANK + latent[None, :]).to(tl.float32)
        second = tl.load(second_ptr + latent[:, None] * HIDDEN + hidden[None, :]).to(tl.float32)
        inner = tl.dot(first, z, input_precision="tf32")
        inner += tl.load(first_bias_ptr + hidden).to(tl.float32)[:, None]
        logits = tl.dot(second, tl.maximum(inner, 0.0), logits, input_precision="tf32")
    return z * (1 + tanh(logits))


@triton.jit
def share_of_latent(
    x_ptr, down_ptr,
    token, first, last, tokens, inputs,
    RANK: tl.constexpr, TOKENS: tl.constexpr, INPUT_TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Σ over inputs first … last − 1 of A · xᵀ without A's scales, (RANK, TOKENS).

    x is the left factor: A, which is converted, would be one in registers, and the products of a pipelined loop read
    those while ptxas up to 12.9 lets the next iteration write them (`kernels.ahead_of_time`).
    """
    latent = tl.arange(0, RANK)
    total = tl.zeros((TOKENS, RANK), tl.float32)
    for start in tl.range(first, last, INPUT_TILE, num_stages=3):
        at = start + tl.arange(0, INPUT_TILE)
        down_at_ptr = down_ptr + latent[None, :] * inputs + at[:, None]
        down = tl.load(down_at_ptr, mask=at[:, None] < last, other=0)
        x_at_ptr = x_ptr + token[:, None].to(tl.int64) * inputs + at[None, :]
        x = tl.load(x_at_ptr, mask=(at[None, :] < last) & (token[:, None] < tokens), other=0.0)
        total = tl.dot(x.to(DOT), down.to(DOT), total, input_precision="ieee")
    return tl.trans(total)


@triton.jit
def leave_latent(
    x_ptr, down_ptr, down_scales_ptr, gate, alpha, shares_ptr, latent_ptr, counter_ptr, token, share, tokens, inputs,
    RANK: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_TILE: tl.constexpr,
    INPUT_TILE: tl.constexpr, SHARES: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compute one share of Ax; the last program stores α · γ(Ax) ⊙ Ax, (tokens, RANK), or Ax itself if not GATED.

    Returns:
        True in the last program.
    """
    latent = tl.arange(0, RANK)
    tiles = tl.cdiv(inputs, INPUT_TILE)
    first = share * tiles // SHARES * INPUT_TILE
    last = tl.minimum((share + 1) * tiles // SHARES * INPUT_TILE, inputs)
    z = share_of_latent(x_ptr, down_ptr, token, first, last, tokens, inputs, RANK, TOKENS, INPUT_TILE, DOT)
    z, is_last = w4.gather_parts(z, shares_ptr, counter_ptr, 0, share, latent, token, tokens, RANK, SHARES)
    if is_last:
        z *= tl.load(down_scales_ptr + latent)[:, None]
        if GATED:
            z = alpha * gated(z, gate, RANK, TOKENS, HIDDEN, HIDDEN_TILE)
        w4.store_tile(latent_ptr, z, latent, token, RANK, (latent[:, None] >= 0) & (token[None, :] < tokens))
    return is_last


@triton.jit
def add_latent_product(total, up, up_scales, z, DOT: tl.constexpr):
    """total + (B · z) ⊙ scales, for total (rows, tokens), B (rows, RANK) without its scales, and z (RANK, tokens)."""
    return total + tl.dot(up.to(DOT), z.to(DOT), input_precision="ieee") * up_scales[:, None]


@triton.jit
def awaited_latent(latent_at_ptr, mask, counters_ptr):
    """The gated latent, once the programs that compute it have raised their flag."""
    ready = tl.atomic_add(counters_ptr + FLAG, 0, sem="acquire")
    while ready == 0:
        ready = tl.atomic_add(counters_ptr + FLAG, 0, sem="acquire")
    return tl.load(latent_at_ptr, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["tokens"])
def fused_kernel(
    x_ptr, qweight_ptr, scales_ptr, zeros_ptr, y_ptr, parts_ptr, arrivals_ptr, down_ptr, down_scales_ptr, up_ptr,
    up_scales_ptr, first_ptr, first_bias_ptr, second_ptr, second_bias_ptr, shares_ptr, latent_ptr, counters_ptr,
    alpha, tokens, outputs, inputs, all_rows, blocks,
    BITS: tl.constexpr, GROUPED: tl.constexpr, HAS_ZEROS: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, RANK: tl.constexpr,
    HIDDEN: tl.constexpr, HIDDEN_TILE: tl.constexpr, INPUT_TILE: tl.constexpr, SHARES: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """The first SHARES programs store the gated latent; the others are W4 tiles and add B to it. One tile of tokens.

    If not GATED, both are stored as they are, for ranks' parts to be summed, and no program waits.
    """
    token = tl.arange(0, TOKENS)
    if tl.program_id(0) < SHARES:
        last = leave_latent(
            x_ptr, down_ptr, down_scales_ptr, (first_ptr, first_bias_ptr, second_ptr, second_bias_ptr), alpha,
            shares_ptr, latent_ptr, counters_ptr + FIRST_SHARE, token, tl.program_id(0), tokens, inputs, RANK, TOKENS,
            HIDDEN, HIDDEN_TILE, INPUT_TILE, SHARES, GATED, DOT,
        )  # fmt: skip
        if GATED and last:
            tl.debug_barrier()
            tl.atomic_xchg(counters_ptr + FLAG, 1, sem="release")
    else:
        tile = (tl.program_id(0) - SHARES) // SPLIT
        part = (tl.program_id(0) - SHARES) % SPLIT
        row = tile * ROWS + tl.arange(0, ROWS)
        total = w4.tile_product(
            x_ptr, qweight_ptr, scales_ptr, zeros_ptr, row, token, part * blocks // SPLIT,
            (part + 1) * blocks // SPLIT, tokens, inputs, all_rows, BITS, GROUPED, HAS_ZEROS, RAGGED, ROWS, TOKENS,
            STAGES, DOT,
        )  # fmt: skip
        latent = tl.arange(0, RANK)
        # Loaded before the last program is known, so that B arrives together with counters and parts.
        up = tl.load(up_ptr + row[:, None] * RANK + latent[None, :])
        up_scales = tl.load(up_scales_ptr + row)
        is_last = True
        if SPLIT > 1:
            total, is_last = w4.gather_parts(
                total, parts_ptr, arrivals_ptr, tile, part, row, token, tokens, all_rows, SPLIT
            )
        if is_last:
            if GATED:
                latent_at_ptr = latent_ptr + token[None, :] * RANK + latent[:, None]
                z = awaited_latent(latent_at_ptr, token[None, :] < tokens, counters_ptr)
                total = add_latent_product(total, up, up_scales, z, DOT)
            w4.store_tile(y_ptr, total, row, token, outputs, (row[:, None] < outputs) & (token[None, :] < tokens))
            if GATED:
                finished = tl.atomic_add(counters_ptr + DONE, 1, sem="acq_rel")
                if finished == tl.cdiv(outputs, ROWS) - 1:
                    tl.store(counters_ptr + FLAG, 0)
                    tl.store(counters_ptr + DONE, 0)


@triton.jit(do_not_specialize=["tokens"])
def latent_kernel(
    x_ptr, down_ptr, down_scales_ptr, first_ptr, first_bias_ptr, second_ptr, second_bias_ptr, shares_ptr, latent_ptr,
    counters_ptr,
    alpha, tokens, inputs,
    RANK: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr, HIDDEN_TILE: tl.constexpr,
    INPUT_TILE: tl.constexpr, SHARES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """α · γ(Ax) ⊙ Ax of many tokens: a tile of tokens and a share of the inputs."""
    tile = tl.program_id(0) // SHARES
    leave_latent(
        x_ptr, down_ptr, down_scales_ptr, (first_ptr, first_bias_ptr, second_ptr, second_bias_ptr), alpha, shares_ptr,
        latent_ptr, counters_ptr + FIRST_SHARE + tile, tile * TOKENS + tl.arange(0, TOKENS), tl.program_id(0) % SHARES,
        tokens, inputs, RANK, TOKENS, HIDDEN, HIDDEN_TILE, INPUT_TILE, SHARES, True, DOT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def correction_kernel(
    y_ptr, latent_ptr, up_ptr, up_scales_ptr,
    tokens, outputs,
    ADDED: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """y = latent · Bᵀ, or y += latent · Bᵀ in place."""
    latent = tl.arange(0, RANK)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    z_ptr = latent_ptr + token[:, None].to(tl.int64) * RANK + latent[None, :]
    z = tl.load(z_ptr, mask=token[:, None] < tokens, other=0.0)
    up = tl.load(up_ptr + row[None, :] * RANK + latent[:, None])
    correction = tl.dot(z.to(DOT), up.to(DOT), input_precision="ieee") * tl.load(up_scales_ptr + row)[None, :]
    mask = (token[:, None] < tokens) & (row[None, :] < outputs)
    place_ptr = y_ptr + token[:, None].to(tl.int64) * outputs + row[None, :]
    if ADDED:
        correction += tl.load(place_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(place_ptr, correction.to(y_ptr.dtype.element_ty), mask=mask)


def fits_one_launch(tokens: int, weight: PackedWeight, rank: int) -> bool:
    """True for few tokens: at most one tile of the W4 product and one of Ax."""
    tiling = w4.tiling_of(tokens, weight)
    return tokens <= min(tiling.tokens, latent_tokens(rank))


def compensated_gemm(x: torch.Tensor, weight: PackedWeight, compensator: Compensator) -> torch.Tensor:
    """Compute `reference.compensated_gemm`; x contiguous."""
    assert x.is_contiguous(), "rows must follow one another"
    tokens = x.numel() // weight.inputs
    if fits_one_launch(tokens, weight, compensator.rank):
        return fused(x, weight, compensator)
    return overlapped(x, weight, compensator)


def fused(x: torch.Tensor, weight: PackedWeight, compensator: Compensator) -> torch.Tensor:
    """The compensated product in one launch, for few tokens."""
    tokens = x.numel() // weight.inputs
    y = x.new_empty(*x.shape[:-1], weight.outputs)
    if tokens:
        latent = torch.empty(tokens, compensator.rank, dtype=x.dtype, device=x.device)
        _launch(x, weight, compensator, y, latent, gated=True)
    return y


def stage(
    x: torch.Tensor, weight: PackedWeight, compensator: Compensator, outputs: torch.Tensor, latents: torch.Tensor
) -> None:
    """Compute `reference.stage`: few tokens, as for `fused`, in one launch."""
    if fits_one_launch(x.shape[0], weight, compensator.rank):
        if x.shape[0]:
            _launch(x, weight, compensator, outputs, latents, gated=False)
        return
    outputs.copy_(w4.w4_gemm(x, weight))
    latents.copy_(torch.nn.functional.linear(x, compensator.down.to(x.dtype)) * compensator.down_scales)


def _launch(
    x: torch.Tensor,
    weight: PackedWeight,
    compensator: Compensator,
    y: torch.Tensor,
    latent: torch.Tensor,
    *,
    gated: bool,
) -> None:
    tokens = x.numel() // weight.inputs
    blocks, rows, _ = weight.qweight.shape
    tiling = w4.tiling_of(tokens, weight)
    assert tokens <= tiling.tokens, "one tile of tokens"
    count = shares(weight.inputs)
    fused_kernel[(count + triton.cdiv(weight.outputs, tiling.rows) * tiling.split,)](
        x, weight.qweight, weight.scales, weight.scales if weight.zeros is None else weight.zeros, y,
        w4.parts_of(x, tokens, rows, tiling.split), weight.arrivals, compensator.down, compensator.down_scales,
        compensator.up, compensator.up_scales, compensator.first, compensator.first_bias, compensator.second,
        compensator.second_bias, _parts_of_latent(x, tokens, count, compensator), latent, compensator.arrivals,
        compensator.alpha, tokens, weight.outputs, weight.inputs, rows, blocks,
        **w4.constants(x.dtype, weight.bits, weight.group, weight.zeros is not None, weight.inputs, tiling),
        **_constants(compensator.rank, compensator.first.shape[0], count), GATED=gated, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip


def overlapped(x: torch.Tensor, weight: PackedWeight, compensator: Compensator) -> torch.Tensor:
    """The compensated product in two streams, for many tokens.

    One of its two terms is rounded to x's type before the other is added: the correction if Ŵ is unpacked.
    """
    tokens = x.numel() // weight.inputs
    count = shares(weight.inputs, triton.cdiv(tokens, latent_tokens(compensator.rank)))
    unpacked = w4.unpacks(tokens, weight)
    # Allocated on the stream that both meet in, so that memory is not handed on while the other still reads it.
    parts = _parts_of_latent(x, tokens, count, compensator)
    latent = torch.empty(tokens, compensator.rank, dtype=x.dtype, device=x.device)
    y = x.new_empty(*x.shape[:-1], weight.outputs)
    main = torch.cuda.current_stream() if x.is_cuda else None
    with beside(main):
        leave_gated_latent(x, compensator, latent, parts, count)
        if unpacked:
            correct(y, latent, compensator, added=False)
    if unpacked:
        dense = w4.unpack(weight, x.dtype)
    else:
        w4.launch(x, weight, y, w4.tiling_of(tokens, weight))
    if main is not None:
        main.wait_stream(side_stream(main))
    if unpacked:
        y.view(tokens, -1).addmm_(x.view(tokens, -1), dense.T)
    else:
        correct(y, latent, compensator, added=True)
    return y


@contextlib.contextmanager
def beside(main: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch on the side stream of another one, behind what that has to do now; without one, just launch."""
    if main is None:
        yield
        return
    side = side_stream(main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield


@functools.cache
def side_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream beside another one. PyTorch hands out 32 streams in turn: a new one each time would be another's."""
    return torch.cuda.Stream()


def _parts_of_latent(x: torch.Tensor, tokens: int, count: int, compensator: Compensator) -> torch.Tensor:
    """Memory for the programs' shares of Ax."""
    return torch.empty(count, tokens, compensator.rank, dtype=torch.float32, device=x.device)


def leave_gated_latent(
    x: torch.Tensor, compensator: Compensator, latent: torch.Tensor, parts: torch.Tensor, count: int
) -> None:
    """latent = α · γ(Ax) ⊙ Ax, (tokens, rank)."""
    tokens, inputs = latent.shape[0], compensator.down.shape[1]
    tile = max(16, min(latent_tokens(compensator.rank), triton.next_power_of_2(tokens)))
    latent_kernel[(triton.cdiv(tokens, tile) * count,)](
        x, compensator.down, compensator.down_scales, compensator.first, compensator.first_bias, compensator.second,
        compensator.second_bias, parts, latent, compensator.arrivals, compensator.alpha, tokens, inputs,
        **_constants(compensator.rank, compensator.first.shape[0], count), TOKENS=tile, DOT=dot_type(x.dtype),
        num_warps=4,
    )  # fmt: skip


def correct(y: torch.Tensor, latent: torch.Tensor, compensator: Compensator, *, added: bool) -> None:
    """y = latent · Bᵀ, or y += latent · Bᵀ in place if `added`, for y (..., outputs)."""
    tokens, outputs = latent.shape[0], compensator.outputs
    correction_kernel[(triton.cdiv(outputs, 128), triton.cdiv(tokens, 64))](
        y, latent, compensator.up, compensator.up_scales, tokens, outputs, ADDED=added, RANK=compensator.rank,
        TOKENS=64, ROWS=128, DOT=dot_type(y.dtype), num_warps=8,
    )  # fmt: skip


def _constants(rank: int, hidden: int, count: int) -> dict[str, object]:
    return {
        "RANK": rank, "HIDDEN": hidden, "HIDDEN_TILE": hidden_tile(rank, hidden), "INPUT_TILE": INPUT_TILE,
        "SHARES": count,
    }  # fmt: skip


def _shipped_fused(tokens: int, rank: int, bits: int = 4, group: int = GROUP, gated: bool = True) -> Shipped:
    tiling = w4.select(tokens, 4096, 4096 // (SPAN * STEPS[bits]), bits)
    return Shipped(
        fused_kernel,
        "*bf16 *i32 *fp16 *fp16 *bf16 *fp32 *i32 *i8 *fp32 *i8 *fp32 *fp16 *fp16 *fp16 *fp16 *fp32"
        f" {'*bf16' if gated else '*fp32'} *i32 fp32 i32 i32 i32 i32 i32",
        {
            "GATED": gated,
            **w4.constants(torch.bfloat16, bits, group, False, 4096, tiling),
            **_constants(rank, 4 * rank, shares(4096)),
        },
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aligned=("outputs", "inputs", "all_rows"),
    )


SHIPPED = [
    *(_shipped_fused(tokens, rank) for tokens, rank in ((1, 32), (1, 64), (1, 128), (32, 128), (64, 64))),
    _shipped_fused(1, 32, group=0),
    _shipped_fused(1, 32, bits=3),
    _shipped_fused(1, 32, gated=False),
    *(
        Shipped(
            latent_kernel,
            "*bf16 *i8 *fp32 *fp16 *fp16 *fp16 *fp16 *fp32 *bf16 *i32 fp32 i32 i32",
            {**_constants(rank, 4 * rank, 8), "TOKENS": latent_tokens(rank), "DOT": tl.bfloat16},
            aligned=("inputs",),
        )
        for rank in (32, 64, 128)
    ),
    *(
        Shipped(
            correction_kernel,
            "*bf16 *bf16 *i8 *fp32 i32 i32",
            {"ADDED": added, "RANK": rank, "TOKENS": 64, "ROWS": 128, "DOT": tl.bfloat16},
            num_warps=8,
            aligned=("outputs",),
        )
        for rank in (32, 64, 128)
        for added in (True, False)
    ),
]
