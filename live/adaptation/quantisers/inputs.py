"""Inputs of linear layers in a forward pass: their second moments and magnitudes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import linear

from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.weights import replaced, to_named
from live.models.weights import Weights


class RecordedInputs:
    """A linear layer that adds up E[x xᵀ], (inputs, inputs), and E|x|, (inputs,), as it computes: sums until `mean`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._count = 0
        inputs = weight.shape[1]
        self.second_moment = torch.zeros(inputs, inputs)
        self.magnitude = torch.zeros(inputs)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x · Wᵀ and record x."""
        rows = x.detach().flatten(0, -2)
        self._count += len(rows)
        self.second_moment += rows.T @ rows
        self.magnitude += rows.abs().sum(0)
        return linear(x, self._weight)

    def mean(self) -> RecordedInputs:
        """Divide the sums by the number of inputs; returns itself."""
        self.second_moment /= self._count
        self.magnitude /= self._count
        return self


@torch.no_grad()
def inputs_and_states(
    forward: ForwardPass, weights: Weights, tokens: torch.Tensor, modules: Iterable[str]
) -> tuple[dict[str, RecordedInputs], torch.Tensor]:
    """What some modules (layers.0.qkv) get of tokens (sequences, n), and the head's states, (sequences, n, hidden)."""
    tensors = to_named(weights)
    recorders = {name: RecordedInputs(tensors[name]) for name in modules}
    states = final_states(forward, replaced(weights, recorders), tokens)
    return {name: recorder.mean() for name, recorder in recorders.items()}, states
