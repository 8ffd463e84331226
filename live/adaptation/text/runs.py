"""The training of a language model with its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from live.adaptation.directories import write_model
from live.adaptation.forward import ForwardPass
from live.adaptation.text.corpus import Corpus, standard_library
from live.adaptation.text.language_model import TextData, next_token_loss, perplexity, text_data, token_losses
from live.adaptation.text.sizes import TextSize
from live.adaptation.text.tokenizer import train_tokenizer, write_tokenizer
from live.adaptation.training import SavedState, train
from live.adaptation.tuning import TunedWeights
from live.adaptation.weights import initial_weights
from live.models.config import Family
from live.models.weights import Weights
from reports.records.run_directory import naming, write_text

SCHEMA = "twin.adaptation/1"
RECORD = "training.json"
STATE = "training.safetensors"


@dataclass(frozen=True)
class TextModel:
    """A trained language model with its data."""

    forward: ForwardPass
    weights: Weights
    tokenizer: Tokenizer
    data: TextData


def train_text_model(
    directory: Path,
    size: TextSize,
    family: Family,
    seed: int,
    *,
    text: Path | None = None,
    advance: Callable[[str], None] = lambda line: None,
) -> tuple[TextModel, dict[str, Any]]:
    """Train a language model and write it to a directory; goes on where it was stopped.

    Args:
        text: folder whose Python sources are the corpus; None: the standard library.

    Returns:
        The model, and the document of `training.json`: corpus, losses, and perplexity on what is held out.
    """
    corpus = standard_library(text)
    tokenizer = train_tokenizer(corpus.training, size.vocabulary)
    data = text_data(tokenizer, corpus.training, corpus.evaluation, size.window)
    config = size.config(family)
    forward, tuned = ForwardPass(config), TunedWeights(config, initial_weights(config, seed))
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    identity = {"kind": "text", "size": asdict(size), "family": family, "seed": seed, "corpus": corpus.digest}

    def loss(step: int) -> torch.Tensor:
        batch = data.batch(size.training.batch_size, seed, step)
        return next_token_loss(forward, tuned.weights(), batch).mean()

    losses = train(tuned.trained, loss, size.training, SavedState(directory / STATE, identity), advance)
    weights = tuned.frozen()
    write_model(directory, config, weights)
    write_tokenizer(directory, tokenizer)
    document = _document(corpus, data, size, seed, losses)
    document["trained_parameters"] = tuned.trained_parameters
    document["perplexity"] = perplexity(token_losses(forward, weights, data.held_out(size.windows)))
    write_text(directory / RECORD, json.dumps(document, indent=1) + "\n")
    return TextModel(forward, weights, tokenizer, data), document


def _document(corpus: Corpus, data: TextData, size: TextSize, seed: int, losses: list[float]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "name": f"language model, {corpus.description}",
        "corpus": {
            "description": corpus.description,
            "digest": corpus.digest,
            "files": [len(corpus.training), len(corpus.evaluation)],
            "tokens": [len(data.training), len(data.evaluation)],
        },
        "text_size": asdict(size),
        "seed": seed,
        "losses": losses,
    }
