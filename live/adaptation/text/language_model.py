"""Language models: windows of text to train on, and perplexity on text that no training reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from live.adaptation.forward import ForwardPass
from live.models.weights import Weights
from workloads.errors import BadInput

EVALUATION_BATCH = 32


@dataclass(frozen=True)
class TextData:
    """Tokens of a corpus, cut in windows.

    Attributes:
        training, evaluation: token ids, files one after the other. window: tokens of a sequence.
    """

    training: NDArray[np.int64]
    evaluation: NDArray[np.int64]
    window: int

    def batch(self, size: int, seed: int, step: int) -> torch.Tensor:
        """The windows of a training step, (size, window); equal arguments draw the same."""
        generator = np.random.default_rng([seed, step])
        begins = generator.integers(len(self.training) - self.window + 1, size=size)
        return torch.from_numpy(self.training[begins[:, None] + np.arange(self.window)])

    def held_out(self, windows: int) -> torch.Tensor:
        """Windows of the text that is held out, spread evenly over it, (windows, window) or as many as it has."""
        whole = len(self.evaluation) // self.window
        cut = self.evaluation[: whole * self.window].reshape(whole, self.window)
        chosen = np.linspace(0, whole - 1, min(windows, whole)).astype(np.int64)
        return torch.from_numpy(cut[chosen])


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int64]:
    """The token ids of texts, one after the other."""
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.concatenate([np.asarray(each.ids, dtype=np.int64) for each in encoded])


def text_data(tokenizer: Tokenizer, training: Iterable[str], evaluation: Iterable[str], window: int) -> TextData:
    """Tokens of training and evaluation texts."""
    made = TextData(encode(tokenizer, training), encode(tokenizer, evaluation), window)
    for name, tokens in (("training", made.training), ("evaluation", made.evaluation)):
        if len(tokens) < window:
            raise BadInput(f"expected at least {window} tokens of {name} text", field="text", value=len(tokens))
    return made


def next_token_loss(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of each token but the first, (batch, n − 1), in nats."""
    logits, _ = forward(weights, tokens[:, :-1])
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def token_losses(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """`next_token_loss` without gradients, a few sequences at a time."""
    return torch.cat([next_token_loss(forward, weights, part) for part in tokens.split(EVALUATION_BATCH)])


def perplexity(losses: torch.Tensor) -> float:
    """The exponential of the mean loss of a token."""
    return float(losses.double().mean().exp())
