"""The compensated product against float64, in one launch, in two streams, and as a chain of library calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import kernel_peers
from kernels.error_compensator import Compensator, from_int8, reference, to_int8, triton
from kernels.w4_gemm import PackedWeight, dequantise, quantise
from tests.kernels.compensators import ROUNDING, dense_up, gate_error, latent_error, random_compensator


def sample(
    tokens: int, outputs: int, inputs: int, rank: int, dtype: torch.dtype, device: str, bits: int = 4
) -> tuple[torch.Tensor, PackedWeight, Compensator]:
    generator = torch.Generator().manual_seed(tokens * 10007 + outputs * 101 + inputs + rank)
    x = torch.randn(tokens, inputs, generator=generator).to(device, dtype)
    weight = quantise(inputs**-0.5 * torch.randn(outputs, inputs, generator=generator).to(device), bits)
    return x, weight, random_compensator(outputs, inputs, rank, device, generator)


def allowed(x: torch.Tensor, weight: PackedWeight, compensation: Compensator, latent_rounding: float) -> torch.Tensor:
    """The most that rounding may add up to.

    The result's own; those of float32 sums (as for the W4 product: three times the root of their length); the gated
    latent, stored with `latent_rounding`; and the gate's argument.
    """
    wide, of_sums = x.double(), 3 * weight.inputs**0.5 * 2**-24
    z = reference.project(wide, compensation)
    sums = of_sums * (wide.abs() @ dequantise(weight, torch.float64).abs().T)
    latent_sums = of_sums * (wide.abs() @ compensation.down.double().abs().T) * compensation.down_scales
    latent = latent_error(z, compensation, latent_rounding) + 4 * latent_sums
    exact = reference.compensated_gemm(wide, weight, compensation)
    up = dense_up(compensation).abs()
    return ROUNDING[x.dtype] * exact.abs() + sums + compensation.alpha * latent @ up.T + 1e-30


def assert_close(
    y: torch.Tensor, x: torch.Tensor, weight: PackedWeight, compensation: Compensator, rounding: float
) -> None:
    exact = reference.compensated_gemm(x.double(), weight, compensation)
    excess = ((y.double() - exact).abs() / allowed(x, weight, compensation, rounding)).max().item()
    assert excess <= 1, excess


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "rank"), [(1, 63, 500, 5), (3, 63, 700, 64), (33, 70, 256, 20)]
)
def test_one_launch(tokens: int, outputs: int, inputs: int, rank: int, dtype: torch.dtype, device: str) -> None:
    x, weight, compensation = sample(tokens, outputs, inputs, rank, dtype, device)
    for _ in range(2):  # the second launch counts from what the first left
        assert_close(triton.fused(x, weight, compensation), x, weight, compensation, ROUNDING[dtype])
    assert compensation.arrivals.count_nonzero() == 0
    assert weight.arrivals.count_nonzero() == 0


@pytest.mark.usefixtures("poisoned")
def test_inputs_split_over_programs(device: str) -> None:
    x, weight, compensation = sample(2, 63, 8 * 256, 24, torch.bfloat16, device)
    assert triton.w4.select(2, 63, 8).split > 1
    assert triton.shares(8 * 256) > 1
    assert_close(triton.fused(x, weight, compensation), x, weight, compensation, ROUNDING[torch.bfloat16])


@pytest.mark.usefixtures("poisoned")
def test_three_bits(device: str) -> None:
    x, weight, compensation = sample(2, 70, 600, 18, torch.float16, device, bits=3)
    assert_close(triton.fused(x, weight, compensation), x, weight, compensation, ROUNDING[torch.float16])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("tokens", "outputs", "inputs", "rank"), [(65, 63, 300, 28)])
@pytest.mark.parametrize("unpacked", [False, True])
def test_two_streams(
    tokens: int, outputs: int, inputs: int, rank: int, unpacked: bool, dtype: torch.dtype, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if unpacked:
        monkeypatch.setattr(triton.w4, "UNPACK_TOKENS", tokens)
    x, weight, compensation = sample(tokens, outputs, inputs, rank, dtype, device)
    wide, dense = x.double(), dequantise(weight, torch.float64)
    exact = reference.compensated_gemm(wide, weight, compensation)
    # One of the two terms is rounded to x's type before the other is added; and Ŵ, where it is unpacked.
    rounded = (exact - wide @ dense.T).abs() + wide.abs() @ dense.abs().T if unpacked else (wide @ dense.T).abs()
    for _ in range(2):  # the second time counts from what the first left
        y = triton.overlapped(x, weight, compensation)
        limit = allowed(x, weight, compensation, ROUNDING[dtype]) + ROUNDING[dtype] * rounded
        assert ((y.double() - exact).abs() <= limit).all()
    assert compensation.arrivals.count_nonzero() == 0


@pytest.mark.usefixtures("poisoned")
def test_shares_of_many_tokens(device: str) -> None:
    compensation = sample(66, 63, 1100, 20, torch.bfloat16, device)[2]
    x = torch.randn(66, 1100, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    latent, parts = (
        torch.empty(66, compensation.rank, device=device),
        torch.empty(2, 66, compensation.rank, device=device),
    )
    triton.leave_gated_latent(x, compensation, latent, parts, 2)
    z = reference.project(x.double(), compensation)
    exact = compensation.alpha * reference.gate(z, compensation) * z
    limit = gate_error(z, compensation) * z.abs() + 2**-16 * exact.abs().max()
    assert ((latent.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize(("tokens", "expected"), [(1, "fused"), (64, "fused"), (65, "overlapped"), (512, "overlapped")])
def test_dispatch_by_tokens(tokens: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, compensation = sample(tokens, 8, 16, 4, torch.float32, "cpu")
    calls = []
    for name in ("fused", "overlapped"):
        monkeypatch.setattr(triton, name, lambda *_, name=name: calls.append(name))
    triton.compensated_gemm(x, weight, compensation)
    assert calls == [expected]


@pytest.mark.parametrize("tokens", [1, 9])
def test_chain_of_library_calls(tokens: int) -> None:
    x, weight, compensation = sample(tokens, 63, 500, 24, torch.float32, "cpu")
    y = kernel_peers.compensated_chain(x, weight, kernel_peers.dense_factors(compensation, torch.float32))
    assert_close(y, x, weight, compensation, ROUNDING[torch.float32])


def test_reference_by_loops() -> None:
    x, weight, compensation = sample(2, 5, 40, 3, torch.float64, "cpu")
    y = reference.compensated_gemm(x, weight, compensation)
    dense = dequantise(weight, torch.float64)
    for token in range(2):
        z = [float(sum(compensation.down[j].double() * x[token]) * compensation.down_scales[j]) for j in range(3)]
        hidden = [
            max(0.0, sum(float(compensation.first[h, j]) * z[j] for j in range(3)) + float(compensation.first_bias[h]))
            for h in range(12)
        ]
        for n in range(5):
            value = float(dense[n] @ x[token])
            for j in range(3):
                logit = sum(float(compensation.second[j, h]) * hidden[h] for h in range(12)) + float(
                    compensation.second_bias[j]
                )
                gate = 1 + torch.tanh(torch.tensor(logit, dtype=torch.float64)).item()
                value += 0.7 * float(compensation.up[n, j]) * float(compensation.up_scales[n]) * gate * z[j]
            assert y[token, n].item() == pytest.approx(value, rel=1e-9)


def test_gate_at_unity_is_a_static_correction() -> None:
    """With W₂ = 0 and b₂ = 0 the compensator is the low-rank adapter that SPEAR's first training stage fits."""
    x, weight, compensation = sample(3, 20, 100, 4, torch.float64, "cpu")
    still = dataclasses.replace(
        compensation,
        second=torch.zeros_like(compensation.second),
        second_bias=torch.zeros_like(compensation.second_bias),
    )
    down = compensation.down.double() * compensation.down_scales[:, None]
    low_rank = compensation.alpha * dense_up(compensation) @ down
    expected = x @ (dequantise(weight, torch.float64) + low_rank).T
    torch.testing.assert_close(reference.compensated_gemm(x, weight, still), expected)


@pytest.mark.parametrize("rank", [5, 16])
def test_stored_parts_are_padded_as_rounded_ones_are(rank: int) -> None:
    _, _, compensation = sample(1, 70, 130, rank, torch.float32, "cpu")
    parts = to_int8(compensation, rank)
    assert parts["up"].shape == (70, rank)
    again = from_int8(parts, alpha=0.7)
    for field in dataclasses.fields(Compensator):
        one, second = getattr(compensation, field.name), getattr(again, field.name)
        assert torch.equal(one, second) if isinstance(one, torch.Tensor) else one == second, field.name
