"""Grids of 2, 3 or 4 bits: codes with a scale and a zero point for each row, or for each group of a row's inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kernels.w4_gemm import PackedWeight, from_codes
from kernels.w4_gemm.pack import GROUP, STEPS
from workloads.errors import BadInput


@dataclass(frozen=True)
class Precision:
    """The bits of a grid (2, 3 or 4), and the inputs that share a scale: 128, or -1 for a whole row (per channel)."""

    bits: int
    group: int = -1

    def __post_init__(self) -> None:
        if self.bits not in (2, *STEPS):
            raise BadInput("expected 2, 3 or 4", field="bits", value=self.bits)
        if self.group not in (-1, GROUP):
            raise BadInput(f"expected {GROUP}, or -1 for whole rows", field="group", value=self.group)

    def span(self, inputs: int) -> int:
        """Inputs that share a scale in a row of `inputs`."""
        return inputs if self.group == -1 else min(self.group, inputs)


@dataclass(frozen=True)
class Grid:
    """Scales (float16 numbers) and zero points, (outputs, groups) float32: w ≈ scale · (code − zero)."""

    scale: torch.Tensor
    zero: torch.Tensor
    bits: int

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest codes of (outputs, groups) weights, in float32."""
        return (weight / self.scale + self.zero).round().clamp(0, 2**self.bits - 1)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes - self.zero) * self.scale


def fit_grid(weight: torch.Tensor, bits: int) -> Grid:
    """The grid of each row and group of a weight (outputs, groups, inputs of a group), from least to largest."""
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    largest = 2**bits - 1
    scale = ((high - low) / largest).clamp(min=torch.finfo(torch.float16).tiny).half().float()
    return Grid(scale, (-low / scale).round().clamp(0, largest), bits)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A weight on a grid: codes (outputs, inputs) uint8, scales float16 and zeros uint8 of (outputs, groups)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    precision: Precision

    def dense(self) -> torch.Tensor:
        """Ŵ, (outputs, inputs) float32: to the last bit what the kernels unpack."""
        inputs = self.codes.shape[1]
        span = self.precision.span(inputs)
        scales, zeros = (values.repeat_interleave(span, 1)[:, :inputs] for values in (self.scales, self.zeros))
        return (self.codes.float() - zeros.float()) * scales.float()

    def packed(self) -> PackedWeight:
        if self.precision.bits not in STEPS:
            raise BadInput("expected 3 or 4: no kernel multiplies with others", field="bits", value=self.precision.bits)
        group = 0 if self.scales.shape[1] == 1 else self.precision.group
        return from_codes(self.codes, self.scales, self.zeros, self.precision.bits, group)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, float16 scales, and zero points of as many bits as a code."""
        bits = self.precision.bits
        return (self.codes.numel() * bits + self.scales.numel() * (16 + bits)) // 8


def grouped(weight: torch.Tensor, span: int) -> torch.Tensor:
    """The weight (outputs, inputs) as (outputs, groups, span); the last group is filled up with zeros."""
    missing = -weight.shape[1] % span
    return pad(weight, (0, missing)).view(len(weight), -1, span)


def round_to_nearest(weight: torch.Tensor, precision: Precision) -> QuantisedMatrix:
    """Round a weight of (outputs, inputs) to the nearest point of its grid (RTN)."""
    span = precision.span(weight.shape[1])
    groups = grouped(weight.float(), span)
    grid = fit_grid(groups, precision.bits)
    wide = Grid(grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1), grid.bits)
    codes = wide.codes(groups).flatten(1)[:, : weight.shape[1]]
    return QuantisedMatrix(codes.to(torch.uint8), grid.scale.half(), grid.zero.to(torch.uint8), precision)
