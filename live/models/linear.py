"""Linear layers, dense or with weights of 3 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch.nn import functional

from kernels.w4_gemm import PackedWeight, quantise, w4_gemm
from kernels.w4_gemm.pack import GROUP, STEPS
from workloads.errors import BadInput


@dataclass(frozen=True)
class Reordered:
    """A packed weight whose inputs are sorted by group: column i multiplies input order[i], (inputs,) int64."""

    weight: PackedWeight
    order: torch.Tensor


@dataclass(frozen=True)
class Stacked:
    """Weights of the same inputs, concatenated along their outputs, that one product cannot compute."""

    parts: tuple[Matrix, ...]


class Group(Protocol):
    """The ranks that share a model. All call its methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, the same bits on each rank."""

    def gather(self, outputs: torch.Tensor, latents: torch.Tensor) -> None:
        """Fill in the other ranks' rows of two buffers, (ranks, …) each, which have this rank's."""


class LinearLayer(Protocol):
    """A linear layer that computes its own product, as one with an error compensator does."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (..., inputs) to (..., outputs)."""


Matrix: TypeAlias = torch.Tensor | PackedWeight | Reordered | Stacked | LinearLayer
"""A weight of (outputs, inputs)."""


def linear(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """y = x · Ŵᵀ, (..., inputs) to (..., outputs)."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    if isinstance(weight, PackedWeight):
        return w4_gemm(x, weight)
    if isinstance(weight, Reordered):
        return w4_gemm(x[..., weight.order], weight.weight)
    if isinstance(weight, Stacked):
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1)
    return weight.product(x)


@dataclass(frozen=True)
class Rounding:
    """Rounding of linear layers that are dense in the checkpoint; `BadInput` for what kernels do not support.

    `bits`: 3 or 4. `group`: inputs that share a scale: 128, or -1 for a whole row. `symmetric`: no zero points.
    """

    bits: int = 4
    group: int = GROUP
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in STEPS:
            raise BadInput("expected 3 or 4", field="quantise.bits", value=self.bits)
        if self.group not in (-1, GROUP):
            raise BadInput(f"expected {GROUP}, or -1 for whole rows", field="quantise.group", value=self.group)

    def __call__(self, weight: torch.Tensor) -> PackedWeight:
        """Round a weight of (outputs, inputs) and any floating type."""
        return quantise(weight, self.bits, max(self.group, 0), self.symmetric)
