"""SiLU(gate) · up: each element is read once and written once, so only bandwidth counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped


@triton.jit
def silu_mul_kernel(packed_ptr, y_ptr, intermediate, BLOCK: tl.constexpr):
    """A program takes BLOCK columns of one row; columns run fastest, so that neighbours read neighbouring memory."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < intermediate
    gate_ptr = packed_ptr + row * 2 * intermediate
    gate = tl.load(gate_ptr + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + intermediate + column, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * intermediate + column, y.to(y_ptr.dtype.element_ty), mask=inside)


MOST_ROWS = 65535
"""Rows of one launch at most: the limit of a grid's second axis."""


def select(rows: int, intermediate: int) -> tuple[int, int]:
    """Columns and warps of a program.

    Two 128-bit loads of 16-bit values a thread and operand (512 columns a warp) keep enough bytes in flight to fill the
    memory of an H100. If rows are too few for one such program on every multiprocessor, a program takes a quarter of
    that: then latency counts, and more programs share it.
    """
    block = 2048 if rows * intermediate >= 132 * 2048 else 512
    block = min(block, triton.next_power_of_2(intermediate))
    return block, max(1, block // 512)


def silu_mul(packed: torch.Tensor) -> torch.Tensor:
    """Compute `reference.silu_mul`; `packed` contiguous."""
    assert packed.is_contiguous(), "rows must follow one another"
    intermediate = packed.shape[-1] // 2
    y = torch.empty((*packed.shape[:-1], intermediate), dtype=packed.dtype, device=packed.device)
    rows = y.numel() // intermediate
    block, warps = select(rows, intermediate)
    packed, flat = packed.view(rows, 2 * intermediate), y.view(rows, intermediate)
    for first in range(0, rows, MOST_ROWS):
        piece = flat[first : first + MOST_ROWS]
        grid = (triton.cdiv(intermediate, block), len(piece))
        silu_mul_kernel[grid](packed[first:], piece, intermediate, BLOCK=block, num_warps=warps)
    return y


SHIPPED = [
    Shipped(
        silu_mul_kernel,
        f"*{kind} *{kind} i32",
        {"BLOCK": block},
        num_warps=warps,
        aligned=("intermediate",),
    )
    for kind in ("bf16", "fp16")
    for block, warps in (select(1, 14336), select(8192, 14336))
]
