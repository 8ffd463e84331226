"""Diagnosis of a quantised model: CKA of final hidden states, one module quantised at a time."""

from __future__ import annotations

import torch

from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.quantisers.models import QuantisedModel


def linear_cka(one: torch.Tensor, other: torch.Tensor) -> float:
    """Linear CKA of two sets of states of the same tokens, each (tokens, hidden); 1 for equal ones (eq. 6).

    It is computed in float64: differences of 1e-9 matter.
    """
    first, second = (states.double() - states.double().mean(0) for states in (one, other))
    similarity = torch.linalg.matrix_norm(first.T @ second) ** 2
    return float(similarity / (torch.linalg.matrix_norm(first.T @ first) * torch.linalg.matrix_norm(second.T @ second)))


def damage(forward: ForwardPass, model: QuantisedModel, tokens: torch.Tensor) -> dict[str, float]:
    """The damage δ of each module, 1 − CKA of final states with it alone quantised (eq. 7).

    Args:
        tokens: calibration text, (sequences, n).
    """
    whole = final_states(forward, model.reference, tokens).flatten(0, 1)
    return {
        name: 1 - linear_cka(whole, final_states(forward, model.weights([name]), tokens).flatten(0, 1))
        for name in model.modules
    }
