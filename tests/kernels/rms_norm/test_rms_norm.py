"""RMSNorm against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import reference, triton

TYPES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Tolerance relative to the largest value: one unit in the last place, since float32 is rounded once at the end."""


def sample(rows: int, hidden: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 10007 + hidden)
    x, residual = (torch.randn(rows, hidden, generator=generator) for _ in range(2))
    weight = 1 + 0.2 * torch.randn(hidden, generator=generator)
    return tuple(tensor.to(device, dtype) for tensor in (3 * x, residual, weight))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (1, 63), (3, 500), (5, 1024), (2, 4096)])
def test_kernel_equals_float64(rows: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x, residual, weight = sample(rows, hidden, dtype, device)
    y, total = triton.add_rms_norm(x, residual, weight, 1e-6)
    exact, exact_total = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-6)
    torch.testing.assert_close(total.double(), exact_total, rtol=TYPES[dtype], atol=1e-6)
    torch.testing.assert_close(y.double(), exact, rtol=TYPES[dtype], atol=1e-6)
    without_residual = triton.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(
        without_residual.double(), reference.rms_norm(x.double(), weight.double(), 1e-6), rtol=TYPES[dtype], atol=1e-6
    )


def test_reference_by_hand() -> None:
    y = reference.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    scale = 12.5**-0.5
    torch.testing.assert_close(y, torch.tensor([[3 * scale, 8 * scale]]))
