"""The training of a language model with its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from live.adaptation.directories import SCHEMA, saved_state, write_model, write_record
from live.adaptation.forward import ForwardPass
from live.adaptation.recipes import Advance, quiet, train_whole
from live.adaptation.sizes import TextSize
from live.adaptation.text.corpus import read_corpus
from live.adaptation.text.language_model import TextData, WindowLesson, perplexity, text_data, token_losses
from live.adaptation.text.tokenizer import train_tokenizer, write_tokenizer
from live.adaptation.weights import initial_weights
from live.models.config import Family
from live.models.weights import Weights


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
    advance: Advance = quiet,
) -> tuple[TextModel, dict[str, Any]]:
    """Train a language model and write it to a directory; goes on where it was stopped.

    Args:
        text: the corpus, as of `read_corpus`.

    Returns:
        The model, and the document of `training.json`: corpus, losses, and perplexity on what is held out.
    """
    corpus = read_corpus(text)
    tokenizer = train_tokenizer(corpus.training, size.vocabulary)
    data = text_data(tokenizer, corpus.training, corpus.evaluation, size.window)
    config = size.config(family)
    forward, start = ForwardPass(config), initial_weights(config, seed)
    identity = {"kind": "text", "size": asdict(size), "family": family, "seed": seed, "corpus": corpus.digest}
    state = saved_state(directory, identity)
    trained = train_whole(forward, start, WindowLesson(data, seed), size.training, state, advance)
    write_model(directory, config, trained.weights)
    write_tokenizer(directory, tokenizer)
    document = {
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
        "losses": trained.losses,
        "trained_parameters": trained.trained_parameters,
        "perplexity": perplexity(token_losses(forward, trained.weights, data.held_out(size.windows))),
    }
    write_record(directory, document)
    return TextModel(forward, trained.weights, tokenizer, data), document
