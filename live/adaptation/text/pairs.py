"""Prompts and answers of one's own, from a JSONL file, as the tokens that the live engine computes.

A prompt is encoded as the server encodes it, and an answer ends with the model's end token, if it has one. One prompt
in sixteen is held out, by its hash. Prompts of one length are computed together, so that none is padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from live.adaptation.forward import Modules
from live.adaptation.text.corpus import is_held_out
from live.adaptation.text.tasks import Examples, measure_examples
from live.models.config import ModelConfig
from live.text.tokenizer import Tokenizer
from workloads.errors import BadInput
from workloads.trace_files import json_lines

FIELDS = ("prompt", "answer")

EVALUATION_BATCH = 8
"""Answers that an evaluation computes at a time; vocabularies are large."""


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt, and of its answer with the end token; neither is empty."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class PairLesson:
    """The data of a fine-tuning. No prompt of `training` is in `evaluation`."""

    training: Sequence[Pair]
    evaluation: Sequence[Pair]
    seed: int

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        rows = np.random.default_rng([self.seed, step]).integers(len(self.training), size=size)
        parts = list(_by_prompt_length([self.training[row] for row in rows], size))
        losses = [modules.loss(part.prompts, part.answers, part.counted) * part.counted.sum() for part in parts]
        return torch.stack(losses).sum() / sum(int(part.counted.sum()) for part in parts)

    def measure(self, modules: Modules, prompts: int) -> dict[str, float]:
        """Measures of at most `prompts` held-out pairs, as of `measure_examples`."""
        return measure_examples(modules, _by_prompt_length(self.evaluation[:prompts], EVALUATION_BATCH))


def pair_lesson(file: Path, model: Path, config: ModelConfig, seed: int) -> PairLesson:
    """The pairs of a file of objects with the texts `prompt` and `answer`, one a line."""
    tokenizer = Tokenizer(model)
    if tokenizer.size > config.shape.vocabulary:
        expected = f"expected at most {config.shape.vocabulary} tokens, the model's vocabulary"
        raise BadInput(expected, field="tokenizer.json", value=tokenizer.size, file=model)
    ends = tokenizer.end_tokens | frozenset(config.end_tokens)
    end = sorted(ends)[:1] if tokenizer.eos is None else [tokenizer.eos]
    parts: dict[bool, list[Pair]] = {False: [], True: []}
    for line, row in json_lines(file):
        try:
            prompt, answer = (_tokens(tokenizer, row, field) for field in FIELDS)
            pair = Pair(prompt, answer + end)
            _check_length(pair, config.max_position_embeddings)
        except BadInput as error:
            raise BadInput(error.expected, value=error.value, field=error.field, file=file, line=line) from None
        parts[is_held_out(row["prompt"])].append(pair)
    if not (parts[False] and parts[True]):
        expected = "expected prompts to train on and to hold out, which is one in sixteen"
        raise BadInput(expected, value=f"{len(parts[False])} and {len(parts[True])}", file=file)
    return PairLesson(parts[False], parts[True], seed)


def _tokens(tokenizer: Tokenizer, row: dict[str, Any], field: str) -> list[int]:
    """The ids of a text; a prompt's with what the tokenizer puts around it."""
    text = row.get(field)
    tokens = []
    if isinstance(text, str):
        try:
            tokens = tokenizer.encode(text, special=field == "prompt")
        except BadInput as error:
            raise BadInput(error.expected, field=field, value=text) from None
    if not text or not tokens:
        raise BadInput("expected a text that is not empty", field=field, value=text)
    return tokens


def _check_length(pair: Pair, positions: int) -> None:
    tokens = len(pair.prompt) + len(pair.answer)
    if tokens > positions:
        expected = f"expected at most {positions} tokens with the prompt's, as many as the model has positions"
        raise BadInput(expected, field="answer", value=tokens)


def _by_prompt_length(pairs: Sequence[Pair], limit: int) -> Iterator[Examples]:
    """Pairs whose prompts have one length, at most `limit` at a time; their answers are filled up with zeros."""
    lengths: dict[int, list[Pair]] = {}
    for pair in pairs:
        lengths.setdefault(len(pair.prompt), []).append(pair)
    for group in lengths.values():
        for begin in range(0, len(group), limit):
            yield _examples(group[begin : begin + limit])


def _examples(pairs: Sequence[Pair]) -> Examples:
    sizes = torch.tensor([len(pair.answer) for pair in pairs])
    longest = int(sizes.max())
    answers = torch.tensor([pair.answer + [0] * (longest - len(pair.answer)) for pair in pairs])
    counted = torch.arange(longest) < sizes[:, None]
    return Examples(torch.tensor([pair.prompt for pair in pairs]), answers, counted)
