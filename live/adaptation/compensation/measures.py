"""Quality lost to quantisation and recovered by compensation, on text that no training reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.text.language_model import EVALUATION_BATCH, perplexity
from live.models.weights import Weights

QUARTILES = 4


@dataclass(frozen=True)
class TokenMeasures:
    """Measures of each predicted token of the evaluation text, (tokens,) float32.

    Attributes:
        loss: negative log-likelihood, nats. divergence: KL from the 16-bit model's distribution, nats.
        deviation: 1 − cosine of the final state and the 16-bit model's (appendix A.1). right: 1 where the likeliest
            token is the text's, else 0.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    deviation: torch.Tensor
    right: torch.Tensor

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return perplexity(self.loss)

    def summary(self) -> dict[str, float]:
        """Perplexity, mean divergence, and accuracy: the share of next tokens that are the likeliest."""
        return {
            "perplexity": self.perplexity,
            "kl": float(self.divergence.double().mean()),
            "accuracy": float(self.right.double().mean()),
        }


@dataclass(frozen=True)
class Evaluation:
    """Evaluation text with the final states that the 16-bit model has for it.

    Attributes:
        tokens: (windows, n). states: (windows, n − 1, hidden), of all tokens but the last. head: the model's.
    """

    forward: ForwardPass
    tokens: torch.Tensor
    states: torch.Tensor
    head: torch.Tensor

    def reference(self) -> TokenMeasures:
        """Measure the 16-bit model itself."""
        return self._measured(self.states)

    def measure(self, weights: Weights) -> TokenMeasures:
        """Measure a model of the same shape."""
        return self._measured(final_states(self.forward, weights, self.tokens[:, :-1]))

    @torch.no_grad()
    def _measured(self, final: torch.Tensor) -> TokenMeasures:
        """Measure the final states that a model has, as of `states`."""
        parts = []
        batches = (each.split(EVALUATION_BATCH) for each in (self.tokens, self.states, final))
        for tokens, states, found in zip(*batches, strict=True):
            logs, told = (each @ self.head.T for each in (found, states))
            logs, told = logs.log_softmax(-1), told.log_softmax(-1)
            loss = -logs.gather(-1, tokens[:, 1:, None])[..., 0]
            divergence = (told.exp() * (told - logs)).sum(-1)
            deviation = 1 - torch.cosine_similarity(found, states, dim=-1)
            right = (logs.argmax(-1) == tokens[:, 1:]).float()
            parts.append([each.flatten() for each in (loss, divergence, deviation, right)])
        return TokenMeasures(*(torch.cat(each) for each in zip(*parts, strict=True)))


def recovered(full: float, quantised: float, compensated: float) -> float:
    """The share of a gap in perplexity that compensation closes: 1 at the 16-bit model's, 0 at the quantised one's."""
    return (quantised - compensated) / (quantised - full)


def by_quartile(
    quantised: TokenMeasures, compensated: TokenMeasures, ungated: TokenMeasures | None = None
) -> list[dict[str, float]]:
    """Recovery by quartiles of the quantisation error, the easiest tokens first (figure 10).

    Tokens are ordered by the deviation of the quantised model's final state, which knows nothing of the next token; by
    its loss, the hardest would be those with bad luck.

    Returns:
        Of each quartile: mean deviation, and how much less loss and divergence a token has, in nats. With `ungated`
        (the same factors, γ at 1) also how much of that the gate adds.
    """
    rows = []
    for tokens in quantised.deviation.argsort().chunk(QUARTILES):
        row = {
            "deviation": float(quantised.deviation[tokens].double().mean()),
            "loss": _less(quantised.loss, compensated.loss, tokens),
            "kl": _less(quantised.divergence, compensated.divergence, tokens),
            "kl_quantised": float(quantised.divergence[tokens].double().mean()),
        }
        if ungated is not None:
            row["gate_loss"] = _less(ungated.loss, compensated.loss, tokens)
            row["gate_kl"] = _less(ungated.divergence, compensated.divergence, tokens)
        rows.append(row)
    return rows


def _less(before: torch.Tensor, after: torch.Tensor, tokens: torch.Tensor) -> float:
    return float((before[tokens].double() - after[tokens].double()).mean())
