"""The tensor-parallel tail against float64; and that a gate on each rank's own part would be another function."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.ec_tail import ec_tail, reference, triton
from kernels.error_compensator import Compensator, compensator
from kernels.error_compensator import reference as unsplit
from kernels.error_compensator.triton import stage
from kernels.rms_norm.reference import rms_norm
from kernels.w4_gemm import dequantise, from_codes, quantise
from kernels.w4_gemm.pack import unpack
from tests.kernels.compensators import ROUNDING, dense_up, latent_error, random_compensator

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Sample:
    outputs: torch.Tensor
    latents: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    compensation: Compensator

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        wide = (tensor.double() for tensor in (self.outputs, self.latents, self.residual, self.weight))
        return reference.ec_tail(*wide, self.compensation, EPSILON)


def sample(ranks: int, tokens: int, hidden: int, rank: int, dtype: torch.dtype, device: str) -> Sample:
    generator = torch.Generator().manual_seed(ranks * 10007 + tokens * 101 + hidden)
    compensation = random_compensator(hidden, 64, rank, device, generator)
    outputs = torch.randn(ranks, tokens, hidden, generator=generator).to(device, dtype)
    latents = torch.randn(ranks, tokens, rank, generator=generator).to(device)
    latents = torch.nn.functional.pad(latents, (0, compensation.rank - rank))
    residual = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    weight = (1 + 0.2 * torch.randn(hidden, generator=generator)).to(device, dtype)
    return Sample(outputs, latents, residual, weight, compensation)


def allowed(case: Sample) -> torch.Tensor:
    """The error of h: its rounding, that of a sum of a few float32 numbers, and the gated latent's, times B."""
    compensation, rounding = case.compensation, ROUNDING[case.residual.dtype]
    latent = latent_error(case.latents.double().sum(0), compensation, rounding)
    size = case.outputs.double().abs().sum(0) + case.residual.double().abs()
    correction = compensation.alpha * latent @ dense_up(compensation).abs().T
    return rounding * case.exact()[1].abs() + 2**-22 * size + correction


def assert_tail(y: torch.Tensor, total: torch.Tensor, case: Sample) -> None:
    exact, exact_total = case.exact()
    error = allowed(case)
    assert ((total.double() - exact_total).abs() <= error).all()
    # The norm divides by the root mean square of h, which is off by no more than that of its errors.
    size = exact_total.square().mean(-1, keepdim=True).sqrt()
    relative = error.square().mean(-1, keepdim=True).sqrt() / size
    allowed_y = error / size * case.weight.double().abs() + (relative + ROUNDING[y.dtype]) * exact.abs() + 1e-6
    assert ((y.double() - exact).abs() <= allowed_y).all()


SIZES = [(1, 1, 63, 5), (2, 1, 500, 28), (4, 17, 300, 20), (2, 3, 1024, 64)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("ranks", "tokens", "hidden", "rank"), SIZES)
def test_kernel_equals_float64(
    ranks: int, tokens: int, hidden: int, rank: int, dtype: torch.dtype, device: str
) -> None:
    case = sample(ranks, tokens, hidden, rank, dtype, device)
    for _ in range(2):  # the second launch counts from what the first left
        y, total = triton.ec_tail(case.outputs, case.latents, case.residual, case.weight, case.compensation, EPSILON)
        assert_tail(y, total, case)
    assert case.compensation.arrivals.count_nonzero() == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gate_on_each_ranks_part_is_wrong(ranks: int, device: str) -> None:
    """Three ways to compute one layer split over ranks; only the gate on the sum is the layer that was not split."""
    generator = torch.Generator().manual_seed(ranks)
    tokens, hidden, inputs, rank = 3, 200, 512, 24
    compensation = random_compensator(hidden, inputs, rank, device, generator)
    weight = quantise(torch.randn(hidden, inputs, generator=generator).to(device) * inputs**-0.5)
    x = torch.randn(tokens, inputs, generator=generator).to(device)
    residual = torch.randn(tokens, hidden, generator=generator).to(device)
    norm = torch.ones(hidden, device=device)
    dense = dequantise(weight).chunk(ranks, dim=1)
    down = (compensation.down * compensation.down_scales[:, None]).chunk(ranks, dim=1)
    parts = x.chunk(ranks, dim=1)
    outputs = torch.stack([part @ share.T for part, share in zip(parts, dense, strict=True)])
    latents = torch.stack([part @ share.T for part, share in zip(parts, down, strict=True)])

    whole = residual + unsplit.compensated_gemm(x, weight, compensation)
    y, total = triton.ec_tail(outputs, latents, residual, norm, compensation, EPSILON)
    torch.testing.assert_close(total, whole, rtol=2e-3, atol=2e-3)  # the gate's argument sees 11 bits
    torch.testing.assert_close(y, rms_norm(whole, norm, EPSILON), rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(
        ec_tail(outputs, latents, residual, norm, compensation, EPSILON)[1], total, rtol=2e-3, atol=2e-3
    )

    correction = unsplit.correction(latents.sum(0), compensation)
    naive = sum(unsplit.correction(latents[part_index], compensation) for part_index in range(ranks))
    missed = (naive - correction).norm() / correction.norm()
    rounding = (total - whole).norm() / correction.norm()
    assert missed > 0.1, "the naive gate misses the correction by more than a tenth of it"
    assert missed > 100 * rounding, "which no rounding explains"


@pytest.mark.usefixtures("poisoned")
def test_two_launches_make_the_layer(device: str) -> None:
    """Each rank stages its parts of Ŵx and Ax in one launch, the tail is the other."""
    generator = torch.Generator().manual_seed(5)
    tokens, hidden, inputs, ranks = 2, 70, 512, 2
    compensation = random_compensator(hidden, inputs, 20, device, generator)
    weight = quantise(torch.randn(hidden, inputs, generator=generator).to(device) * inputs**-0.5)
    x = torch.randn(tokens, inputs, generator=generator).to(device)
    residual = torch.randn(tokens, hidden, generator=generator).to(device)
    outputs = torch.empty(ranks, tokens, hidden, device=device)
    latents = torch.empty(ranks, tokens, compensation.rank, device=device)
    codes, scales = unpack(weight.qweight, 4)[:hidden].chunk(ranks, dim=1), weight.scales[:, :hidden].T.chunk(ranks, 1)
    downs = compensation.down.chunk(ranks, dim=1)
    for rank in range(ranks):
        share = dataclasses.replace(compensation, down=downs[rank].contiguous())
        part = from_codes(codes[rank], scales[rank], None, bits=4, group=128)
        stage(x.chunk(ranks, dim=1)[rank].contiguous(), part, share, outputs[rank], latents[rank])
    y, total = triton.ec_tail(outputs, latents, residual, torch.ones(hidden, device=device), compensation, EPSILON)
    case = Sample(outputs, latents, residual, torch.ones(hidden, device=device), compensation)
    assert_tail(y, total, case)
    whole = residual.double() + unsplit.compensated_gemm(x.double(), weight, compensation)
    # As in `allowed`, and for sums of 512 products that were rounded on the way: 3 · 2^-24 · √512 of their size.
    sums = 3 * 2**-24 * inputs**0.5 * (x.double().abs() @ dequantise(weight, torch.float64).abs().T)
    assert ((total.double() - whole).abs() <= 2 * allowed(case) + sums).all()


def test_reference_by_hand() -> None:
    """One coordinate, W₂ = 0: the gate is 1 + tanh(b₂)."""
    one = torch.ones(1, 1)
    compensation = compensator(one, one, one, torch.zeros(1), 0 * one, torch.full((1,), 0.5), alpha=2.0)
    latents = torch.zeros(2, 1, compensation.rank, dtype=torch.float64)
    latents[:, 0, 0] = torch.tensor([1.0, 2.0])
    outputs = torch.tensor([[[5.0]], [[7.0]]], dtype=torch.float64)
    y, total = reference.ec_tail(outputs, latents, 11 * one.double(), 3 * one[0].double(), compensation, 0.0)
    assert total.item() == pytest.approx(11 + 5 + 7 + 2 * (1 + torch.tanh(torch.tensor(0.5)).item()) * 3, rel=1e-6)
    assert y.item() == pytest.approx(3.0)
