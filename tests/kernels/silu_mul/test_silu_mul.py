"""SiLU · up against float64."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.silu_mul import reference, triton

TYPES = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative tolerance. 16-bit types: one unit in the last place, since float32 is rounded once at the end. float32: the
exponential, the quotient and two products, each within 2 units of 2⁻²³."""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "intermediate"), [(1, 1), (1, 63), (3, 500), (7, 1000), (2, 11008)])
def test_kernel_equals_float64(rows: int, intermediate: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(rows * 10007 + intermediate)
    packed = (4 * torch.randn(rows, 2 * intermediate, generator=generator)).to(device, dtype)
    exact = reference.silu_mul(packed.double())
    smallest = torch.finfo(dtype).tiny
    torch.testing.assert_close(triton.silu_mul(packed).double(), exact, rtol=TYPES[dtype], atol=smallest)
    torch.testing.assert_close(reference.silu_mul(packed).double(), exact, rtol=TYPES[dtype], atol=smallest)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter: 1 / (1 + ∞) is meant
def test_large_gates_neither_overflow_nor_turn_into_nan(device: str) -> None:
    packed = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=device)
    torch.testing.assert_close(triton.silu_mul(packed).cpu(), torch.tensor([[0.0, 600.0]]))


def test_more_rows_than_one_launch_takes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "MOST_ROWS", 2)
    packed = torch.randn(5, 8, device=device)
    torch.testing.assert_close(triton.silu_mul(packed), reference.silu_mul(packed))


def test_reference_by_hand() -> None:
    y = reference.silu_mul(torch.tensor([[0.0, math.log(3), 5.0, 8.0]]))
    torch.testing.assert_close(y, torch.tensor([[0.0, 6 * math.log(3)]]))
