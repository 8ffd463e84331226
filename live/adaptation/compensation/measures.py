"""Quality lost to quantisation and recovered by compensation, on text that no training reads; bytes of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from live.adaptation.directories import read_model
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.text.corpus import read_corpus
from live.adaptation.text.language_model import EVALUATION_BATCH, TextData, encode, perplexity, read_tokenizer
from live.models.config import ModelConfig
from live.models.weights import Weights
from workloads.errors import BadInput

QUARTILES = 4

WINDOW, WINDOWS = 128, 128
"""Tokens of a window of held-out text, and the number of windows."""


@dataclass(frozen=True)
class TokenMeasures:
    """Measures of each predicted token, (tokens,) float32: loss and KL from the 16-bit model, nats; the deviation

    1 − cosine of the final states (appendix A.1); and 1 where the likeliest token is the text's.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    deviation: torch.Tensor
    right: torch.Tensor

    @property
    def perplexity(self) -> float:
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
    """Evaluation text (windows, n) with the 16-bit model's final states, (windows, n − 1, hidden)."""

    forward: ForwardPass
    tokens: torch.Tensor
    states: torch.Tensor
    head: torch.Tensor

    @classmethod
    def on_held_out(
        cls, model: Path, forward: ForwardPass, weights: Weights, sources: Path | None, window: int, windows: int
    ) -> Evaluation:
        """Evaluation on the held-out text of `sources`, as of `read_corpus`."""
        tokens = encode(read_tokenizer(model), read_corpus(sources).evaluation)
        window = min(window, forward.config.max_position_embeddings)
        if len(tokens) < window:
            raise BadInput(f"expected at least {window} tokens of held-out text", field="text", value=len(tokens))
        held_out = TextData(tokens, tokens, window).held_out(windows)
        assert weights.head is not None
        return cls(forward, held_out, final_states(forward, weights, held_out[:, :-1]), weights.head)

    def reference(self) -> TokenMeasures:
        """Measure the 16-bit model itself."""
        return self._measured(self.states)

    def measure(self, weights: Weights) -> TokenMeasures:
        return self._measured(final_states(self.forward, weights, self.tokens[:, :-1]))

    @torch.no_grad()
    def _measured(self, final: torch.Tensor) -> TokenMeasures:
        parts = []
        batches = (tensor.split(EVALUATION_BATCH) for tensor in (self.tokens, self.states, final))
        for tokens, reference, states in zip(*batches, strict=True):
            logs, targets = ((x @ self.head.T).log_softmax(-1) for x in (states, reference))
            loss = -logs.gather(-1, tokens[:, 1:, None])[..., 0]
            divergence = (targets.exp() * (targets - logs)).sum(-1)
            deviation = 1 - torch.cosine_similarity(states, reference, dim=-1)
            right = (logs.argmax(-1) == tokens[:, 1:]).float()
            parts.append([measure.flatten() for measure in (loss, divergence, deviation, right)])
        return TokenMeasures(*map(torch.cat, zip(*parts, strict=True)))


def recovered(full: float, quantised: float, compensated: float) -> float:
    """The share of a gap in perplexity that compensation closes: 1 at the 16-bit model's, 0 at the quantised one's."""
    return (quantised - compensated) / (quantised - full)


def by_quartile(
    quantised: TokenMeasures, compensated: TokenMeasures, ungated: TokenMeasures | None = None
) -> list[dict[str, float]]:
    """Recovery by quartiles of the deviation of the quantised model's final state, the easiest tokens first (figure
    10).

    By its loss, the hardest would be those with bad luck. With `ungated` (γ at 1) also what the gate adds.
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


def text_quality(models: Sequence[Path], sources: Path | None = None) -> list[dict[str, Any]]:
    """Perplexity and accuracy on held-out text, mean divergence from the first model (nats), and bytes of weights."""
    config, reference = read_model(models[0])
    evaluation = Evaluation.on_held_out(models[0], ForwardPass(config), reference, sources, WINDOW, WINDOWS)
    rows = []
    for directory in models:
        weights = _same_shape(directory, config)
        rows.append({**evaluation.measure(weights).summary(), "bytes": weight_bytes(weights)})
    return rows


def weight_bytes(weights: Weights) -> int:
    """Bytes of all tensors, packed words, scales and compensators; tensors that share memory count once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(weights)}
    return sum(sizes.values())


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _same_shape(directory: Path, config: ModelConfig) -> Weights:
    other_config, weights = read_model(directory)
    if replace(other_config, quantisation=None) != replace(config, quantisation=None):
        raise BadInput("expected the shape of the first model", file=directory)
    return weights
