"""Grids: rounding equals the kernels', codes pack as they are, and no other grid point is nearer."""

from __future__ import annotations

import pytest
import torch

from kernels.w4_gemm import dequantise, quantise
from live.adaptation.quantisers import Precision, round_to_nearest
from workloads.errors import BadInput


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(20, 300, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 3, 20).unsqueeze(1)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("group", [-1, 128])
def test_rounding_is_the_kernels(weight: torch.Tensor, bits: int, group: int) -> None:
    matrix = round_to_nearest(weight, Precision(bits, group))
    expected = quantise(weight, bits, max(group, 0), symmetric=False)
    assert torch.equal(matrix.dense(), dequantise(expected))
    assert torch.equal(dequantise(matrix.packed()), matrix.dense())


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("group", [-1, 128])
def test_no_point_of_the_grid_is_nearer(weight: torch.Tensor, bits: int, group: int) -> None:
    matrix = round_to_nearest(weight, Precision(bits, group))
    span = matrix.precision.span(300)
    scales = matrix.scales.float().repeat_interleave(span, 1)[:, :300]
    zeros = matrix.zeros.float().repeat_interleave(span, 1)[:, :300]
    every = torch.stack([(code - zeros) * scales for code in range(2**bits)])
    nearest = (every - weight).abs().amin(0)
    torch.testing.assert_close((matrix.dense() - weight).abs(), nearest, rtol=0, atol=1e-6)
    assert len(matrix.codes[0].unique()) > 2 ** (bits - 1)


def test_rows_of_one_sign_and_of_zeros() -> None:
    matrix = round_to_nearest(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), Precision(2))
    assert torch.equal(matrix.dense(), torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))


def test_two_bits_have_no_kernel(weight: torch.Tensor) -> None:
    with pytest.raises(BadInput, match="bits: got 2, expected 3 or 4"):
        round_to_nearest(weight, Precision(2)).packed()


def test_bytes_are_codes_scales_and_zero_points(weight: torch.Tensor) -> None:
    assert round_to_nearest(weight, Precision(4)).nbytes == 20 * 300 // 2 + 20 * 20 // 8
    assert round_to_nearest(weight, Precision(2, 128)).nbytes == 20 * 300 // 4 + 20 * 3 * 18 // 8


@pytest.mark.parametrize(("bits", "group"), [(5, -1), (1, -1), (4, 64), (4, 0)])
def test_other_widths_are_refused(bits: int, group: int) -> None:
    with pytest.raises(BadInput):
        Precision(bits, group)
