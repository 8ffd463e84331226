"""Text that a model writes itself, from a line's beginning: calibration without data from outside (SPEAR, 3.1)."""

from __future__ import annotations

import torch

from live.adaptation.forward import ForwardPass
from live.models.weights import Weights


@torch.no_grad()
def self_sampled(
    forward: ForwardPass, weights: Weights, first: int, sequences: int, tokens: int, seed: int
) -> torch.Tensor:
    """Sequences that are drawn token by token from the model's own distribution, at temperature 1.

    Args:
        first: the token that all of them begin with. tokens: of a sequence, with the first.

    Returns:
        (sequences, tokens) int64.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.full((sequences, 1), first)]
    logits, cache = forward(weights, drawn[0])
    while True:
        drawn.append(torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator))
        if len(drawn) == tokens:
            return torch.cat(drawn, dim=1)
        logits, cache = forward(weights, drawn[-1], cache)
