"""Language models: windows of text to train on, perplexity on text that no training reads, and text they write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from live.adaptation.decomposition import Modules
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
        count = len(self.evaluation) // self.window
        all_windows = self.evaluation[: count * self.window].reshape(count, self.window)
        rows = np.linspace(0, count - 1, min(windows, count)).astype(np.int64)
        return torch.from_numpy(all_windows[rows])


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int64]:
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.concatenate([np.asarray(text.ids, dtype=np.int64) for text in encoded])


def text_data(tokenizer: Tokenizer, training: Iterable[str], evaluation: Iterable[str], window: int) -> TextData:
    data = TextData(encode(tokenizer, training), encode(tokenizer, evaluation), window)
    for name, tokens in (("training", data.training), ("evaluation", data.evaluation)):
        if len(tokens) < window:
            raise BadInput(f"expected at least {window} tokens of {name} text", field="text", value=len(tokens))
    return data


@dataclass(frozen=True)
class WindowLesson:
    """The data of a language model's training. `seed`: of everything that is drawn."""

    data: TextData
    seed: int

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        return next_token_loss(modules.forward, modules.prefill, self.data.batch(size, self.seed, step)).mean()


def next_token_loss(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of each token but the first, (batch, n − 1), in nats."""
    logits, _ = forward(weights, tokens[:, :-1])
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def token_losses(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """`next_token_loss` without gradients, a few sequences at a time."""
    return torch.cat([next_token_loss(forward, weights, part) for part in tokens.split(EVALUATION_BATCH)])


def perplexity(losses: torch.Tensor) -> float:
    return float(losses.double().mean().exp())


@torch.no_grad()
def self_sampled(
    forward: ForwardPass, weights: Weights, first: int, sequences: int, tokens: int, seed: int
) -> torch.Tensor:
    """Sequences that are drawn token by token from the model's own distribution, at temperature 1 (SPEAR, 3.1).

    Args:
        first: the token that all of them begin with. tokens: of a sequence, with the first.

    Returns:
        (sequences, tokens) int64.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.full((sequences, 1), first)]
    logits, cache = forward(weights, columns[0])
    while True:
        columns.append(torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator))
        if len(columns) == tokens:
            return torch.cat(columns, dim=1)
        logits, cache = forward(weights, columns[-1], cache)
