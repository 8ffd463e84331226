"""RMSNorm, one program a row: a row is read once, kept in registers, and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.shipping import Shipped


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr,
    hidden, epsilon,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = norm(x + residual) · weight; the sum goes to `sum_ptr`. Rows are contiguous, BLOCK ≥ hidden."""
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(sum_ptr + row + column, total.to(sum_ptr.dtype.element_ty), mask=inside)
    mean = tl.sum(total * total, axis=0) / hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    y = total * tl.rsqrt(mean + epsilon) * weight
    tl.store(y_ptr + row + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def warps_for(hidden: int) -> int:
    """The warps with which each thread keeps at most 16 elements of the row in flight."""
    width: int = triton.next_power_of_2(hidden)
    return max(1, min(16, width // 512))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute `reference.rms_norm`; x contiguous."""
    y = torch.empty_like(x)
    _launch(x, x, weight, y, y, epsilon, has_residual=False)
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.add_rms_norm`; x and residual contiguous. h is a new tensor."""
    y, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, y, total, epsilon, has_residual=True)
    return y, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor,
    epsilon: float,
    *,
    has_residual: bool,
) -> None:
    hidden = x.shape[-1]
    assert x.is_contiguous(), "rows must follow one another"
    assert residual.is_contiguous(), "rows must follow one another"
    rms_norm_kernel[(x.numel() // hidden,)](
        x, residual, weight, y, total, hidden, epsilon, HAS_RESIDUAL=has_residual,
        BLOCK=triton.next_power_of_2(hidden), num_warps=warps_for(hidden),
    )  # fmt: skip


SHIPPED = [
    Shipped(
        rms_norm_kernel,
        "*bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32",
        {"HAS_RESIDUAL": residual, "BLOCK": triton.next_power_of_2(hidden)},
        num_warps=warps_for(hidden),
        aligned=("hidden",),
    )
    for hidden in (1024, 4096, 8192)
    for residual in (False, True)
]
