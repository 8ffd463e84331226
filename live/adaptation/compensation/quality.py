"""Quality and memory of language models as the live engine loads them: dense, in few bits, and with compensators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from live.adaptation.compensation.measures import Evaluation
from live.adaptation.directories import read_model
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.text.corpus import standard_library
from live.adaptation.text.language_model import TextData, encode
from live.adaptation.text.tokenizer import read_tokenizer
from live.models.config import ModelConfig
from live.models.weights import Weights
from workloads.errors import BadInput

WINDOW, WINDOWS = 128, 128
"""Tokens of a window of held-out text, and the number of windows."""


def text_quality(models: Sequence[Path], sources: Path | None = None) -> list[dict[str, Any]]:
    """Perplexity and accuracy on held-out text, mean divergence from the first model in nats, and bytes of the weights.

    Accuracy is the share of tokens that the model finds likeliest, given those before them.

    Args:
        models: directories with tokenizers; all have the shape of the first.
        sources: folder whose held-out Python files are the text; None: the standard library.
    """
    config, reference = read_model(models[0])
    tokens = encode(read_tokenizer(models[0]), standard_library(sources).evaluation)
    window = min(WINDOW, config.max_position_embeddings)
    if len(tokens) < window:
        raise BadInput(f"expected at least {window} tokens of held-out text", field="text", value=len(tokens))
    held_out = TextData(tokens, tokens, window).held_out(WINDOWS)
    forward = ForwardPass(config)
    assert reference.head is not None
    evaluation = Evaluation(forward, held_out, final_states(forward, reference, held_out[:, :-1]), reference.head)
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
    """Every tensor in nested dataclasses and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _same_shape(directory: Path, config: ModelConfig) -> Weights:
    """The weights of a directory."""
    found, weights = read_model(directory)
    if replace(found, quantisation=None) != replace(config, quantisation=None):
        raise BadInput("expected the shape of the first model", file=directory)
    return weights
