"""Error compensators: as they are trained, and as they are stored for `kernels/error_compensator`.

Static terms of low rank, Ŵ + B · A, are baselines, and compensators begin as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernels.error_compensator import Compensator, compensator
from kernels.error_compensator.reference import correction, project
from live.adaptation.weights import replaced
from live.models.weights import Weights

GATE_WIDTH = 4
"""Hidden units of the gate for each latent coordinate."""

FLOOR = 1e-6
"""The least eigenvalue that an inputs' second moment is given, as a share of their mean, so that it has an inverse."""

PARTS = ("down", "up", "first", "first_bias", "second", "second_bias")


@dataclass(frozen=True)
class TrainedCompensator:
    """A frozen quantised linear layer Ŵ, (outputs, inputs), with y = Ŵx + B(γ(Ax) ⊙ Ax) in autograd's graph (eq. 3)."""

    weight: torch.Tensor
    parts: Mapping[str, torch.Tensor]
    gated: bool = True

    def product(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts
        latent = linear(x, parts["down"])
        if self.gated:
            inner = linear(latent, parts["first"], parts["first_bias"]).relu()
            latent = latent * (1 + torch.tanh(linear(inner, parts["second"], parts["second_bias"])))
        return linear(x, self.weight) + linear(latent, parts["up"])


@dataclass(frozen=True)
class StoredCompensator:
    """A quantised linear layer, dense, with a compensator as it is stored. `weight`: Ŵ, (outputs, inputs)."""

    weight: torch.Tensor
    compensator: Compensator

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what `kernels.error_compensator.compensated_gemm` computes, with Ŵ unpacked once."""
        return linear(x, self.weight) + correction(project(x, self.compensator), self.compensator)


def initial_gate(rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A gate that is 1 for every token: W₂ and both biases are 0, so that training begins with a static term."""
    width, generator = GATE_WIDTH * rank, torch.Generator().manual_seed(seed)
    return {
        "first": torch.randn(width, rank, generator=generator) / math.sqrt(rank),
        "first_bias": torch.zeros(width),
        "second": torch.zeros(rank, width),
        "second_bias": torch.zeros(rank),
    }


def stored(parts: Mapping[str, torch.Tensor]) -> Compensator:
    """A trained compensator in INT8, as the kernels run it."""
    down, up, first, first_bias, second, second_bias = (parts[name].detach() for name in PARTS)
    return compensator(down, up, first, first_bias, second, second_bias)


def compensated(
    weights: Weights,
    dense: Mapping[str, torch.Tensor],
    parts: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    gated: bool = True,
) -> Weights:
    """A quantised model with trained compensators on some modules; `dense`: Ŵ by module."""
    return replaced(weights, {name: TrainedCompensator(dense[name], tensors, gated) for name, tensors in parts.items()})


def with_stored(
    weights: Weights, dense: Mapping[str, torch.Tensor], compensators: Mapping[str, Compensator]
) -> Weights:
    """A quantised model with stored compensators on some modules; arguments as of `compensated`."""
    return replaced(
        weights, {name: StoredCompensator(dense[name], compensator) for name, compensator in compensators.items()}
    )


def svd_factors(error: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A, (rank, inputs), and B, (outputs, rank), of evenly divided values, with B · A nearest to W − Ŵ (LQER)."""
    left, values, right = torch.linalg.svd(error.double(), full_matrices=False)
    root = values[:rank].sqrt()
    return (root.unsqueeze(1) * right[:rank]).float(), (left[:, :rank] * root).float()


def whitened_factors(error: torch.Tensor, second_moment: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B with the least E‖(W − Ŵ − B · A) x‖² (QERA's exact solution, Zhang et al. 2025; EoRA in its eigenbasis).

    With R = E[x xᵀ], (inputs, inputs), they are the truncated SVD of (W − Ŵ) R^½, and A is multiplied with R^−½.
    """
    values, vectors = torch.linalg.eigh(second_moment.double())
    values = values.clamp(min=FLOOR * float(values.mean())).sqrt()
    root, inverse = vectors * values @ vectors.T, vectors / values @ vectors.T
    down, up = svd_factors(error.double() @ root, rank)
    return (down.double() @ inverse).float(), up
