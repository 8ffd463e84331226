"""Error compensators: stored for `kernels/error_compensator`, and trained in two phases (SPEAR, 3.1 and Table 7).

A and B are trained with the gate at 1, then the gate alone. Static terms of low rank, Ŵ + B · A, are baselines, and
compensators begin as one."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import kl_div, linear

from kernels.error_compensator import Compensator, compensator
from kernels.error_compensator.reference import correction, project
from live.adaptation.forward import ForwardPass
from live.adaptation.quantisers import QuantisedModel, RecordedInputs, inputs_and_states
from live.adaptation.training import Advance, TrainingSettings, quiet, train
from live.adaptation.weights import module_names, replaced
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


TEMPERATURE = 2.0

FACTORS, GATE = PARTS[:2], PARTS[2:]


@dataclass(frozen=True)
class CalibrationSettings:
    """The two phases' trainings. `factors`: of A and B. `gate`: of the gate, with A and B frozen."""

    factors: TrainingSettings
    gate: TrainingSettings


@dataclass(frozen=True)
class CalibrationText:
    """Text with the 16-bit model's final states, (sequences, n, hidden), and what its linear layers get."""

    tokens: torch.Tensor
    states: torch.Tensor
    head: torch.Tensor
    inputs: dict[str, RecordedInputs]


@dataclass(frozen=True)
class Calibrated:
    """A quantised model with trained A, B and gate of each module, float32, and the losses of both phases."""

    model: QuantisedModel
    parts: dict[str, dict[str, torch.Tensor]]
    losses: list[float]

    def weights(self) -> Weights:
        """The model with compensators in float32, as they were trained."""
        return compensated(self.model.weights(), self.dense(), self.parts)

    def stored(self) -> dict[str, Compensator]:
        """The compensators in INT8, by module."""
        return {name: stored(parts) for name, parts in self.parts.items()}

    def stored_weights(self) -> Weights:
        """The model with compensators in INT8, as the kernels run them."""
        dense, parts = self.dense(), self.stored()
        return replaced(self.model.weights(), {name: StoredCompensator(dense[name], parts[name]) for name in parts})

    def dense(self) -> dict[str, torch.Tensor]:
        return {name: self.model.modules[name].dense() for name in self.parts}


def calibration_text(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> CalibrationText:
    """Compute what calibration needs of the 16-bit model, once for all trainings with this text."""
    assert weights.head is not None
    inputs, states = inputs_and_states(forward, weights, tokens, module_names(forward.config))
    return CalibrationText(tokens, states, weights.head, inputs)


def calibrate(
    forward: ForwardPass,
    model: QuantisedModel,
    modules: Collection[str],
    rank: int,
    text: CalibrationText,
    settings: CalibrationSettings,
    *,
    gated: bool = True,
    seed: int = 0,
    advance: Advance = quiet,
) -> Calibrated:
    """Train compensators of one rank on some modules.

    A and B begin as the static term with the least error of the module's output. Without a gate the second phase goes
    on with A and B, so that the number of steps is the same.
    """
    errors = model.errors()
    parts = {}
    for name in modules:
        down, up = whitened_factors(errors[name], text.inputs[name].second_moment, rank)
        parts[name] = {"down": down, "up": up, **initial_gate(rank, seed)}
    dense = {name: model.modules[name].dense() for name in modules}
    quantised, losses = model.weights(), []
    phases = ((FACTORS, settings.factors, False), (GATE if gated else FACTORS, settings.gate, gated))
    for phase, (trained, training, with_gate) in enumerate(phases):
        leaves = {f"{name}.{part}": parts[name][part].requires_grad_() for name in modules for part in trained}
        weights = compensated(quantised, dense, parts, gated=with_gate)

        def loss(
            step: int, weights: Weights = weights, size: int = training.batch_size, phase: int = phase
        ) -> torch.Tensor:
            rows = batch_rows(len(text.tokens), size, seed + phase, step)
            return distillation_loss(forward, weights, text, rows)

        losses += train(leaves, loss, training, advance=advance)
        for leaf in leaves.values():
            leaf.detach_()
    return Calibrated(model, parts, losses)


def distillation_loss(
    forward: ForwardPass, weights: Weights, text: CalibrationText, rows: torch.Tensor
) -> torch.Tensor:
    """The mean KL(P_fp ‖ P_θ) of a token at temperature 2 (eq. 5), a scalar in nats."""
    logits, _ = forward(weights, text.tokens[rows])
    targets = (text.states[rows] @ text.head.T / TEMPERATURE).log_softmax(-1)
    predictions = (logits / TEMPERATURE).log_softmax(-1)
    return kl_div(predictions.flatten(0, 1), targets.flatten(0, 1), reduction="batchmean", log_target=True)


def batch_rows(sequences: int, batch_size: int, seed: int, step: int) -> torch.Tensor:
    """The sequences of a step, (batch_size,): every one once in each epoch, in an order of its own.

    Equal arguments give the same.
    """
    per_epoch = max(sequences // batch_size, 1)
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(sequences)
    return torch.from_numpy(order[place * batch_size : (place + 1) * batch_size])
