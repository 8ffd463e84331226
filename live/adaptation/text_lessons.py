"""Examples that a language model is fine-tuned with: two tasks made of Python sources, and pairs of one's own.

brackets     the brackets that are open in a line of code, in the order in which they close: `f(a[{1` gives `}])`
docstring    the first line of a function's docstring, after its header
pairs        prompts and answers of a JSONL file

A task's prompt is filled up with line ends on its left, so that all prompts of it have one length. Its answer ends with
a line end; what is behind that does not count. A pair's prompt is encoded as the server encodes it, and its answer ends
with the model's end token, if it has one. One prompt in sixteen is held out, by its hash. Pairs whose prompts have one
length are computed together, so that none is padded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch.nn.functional import cross_entropy

from live.adaptation.forward import Modules
from live.adaptation.language_model import Corpus, is_held_out
from live.models.config import ModelConfig
from live.tokenizer import Tokenizer
from workloads.errors import BadInput
from workloads.trace_files import json_lines

EVALUATION_BATCH = 64

CLOSING = {"(": ")", "[": "]", "{": "}"}

DEPTHS = range(2, 6)
"""Open brackets of an example: with one, the answer would be the prefill module's alone."""

DOCSTRING = re.compile(r'^[ \t]*(def [^\n]*:)\n[ \t]*(?:r|R)?"""([^\n"]+)', re.MULTILINE)


@dataclass(frozen=True)
class Form:
    """Tokens of a task's prompts and answers; prompts are cut at their beginning, answers at their end."""

    prompt: int
    answer: int


FORMS = {"brackets": Form(40, 6), "docstring": Form(56, 40)}


@dataclass(frozen=True)
class Examples:
    """Prompts (examples, p) and answers (examples, n), int64 filled up with line ends; `counted`: not the filling."""

    prompts: torch.Tensor
    answers: torch.Tensor
    counted: torch.Tensor

    def rows(self, indices: torch.Tensor | slice) -> Examples:
        return Examples(self.prompts[indices], self.answers[indices], self.counted[indices])


@dataclass(frozen=True)
class TextLesson:
    """Examples of files that the language model was trained on, and of files that it was not."""

    training: Examples
    evaluation: Examples
    seed: int

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        generator = np.random.default_rng([self.seed, step])
        batch = self.training.rows(torch.from_numpy(generator.integers(len(self.training.prompts), size=size)))
        return modules.loss(batch.prompts, batch.answers, batch.counted)

    def sequences(self, count: int) -> torch.Tensor:
        """Prompts with their answers from the training part, (count, n), or as many as there are."""
        some = self.training.rows(_spread(len(self.training.prompts), count))
        return torch.cat([some.prompts, some.answers], dim=1)

    def measure(self, modules: Modules, prompts: int) -> dict[str, float]:
        """Measures of some held-out examples, as of `measure_examples`."""
        rows = _spread(len(self.evaluation.prompts), prompts)
        return measure_examples(modules, (self.evaluation.rows(part) for part in rows.split(EVALUATION_BATCH)))


@torch.no_grad()
def measure_examples(modules: Modules, parts: Iterable[Examples]) -> dict[str, float]:
    """Shares of answers that are right as a whole, and of right tokens given those before; perplexity of a token."""
    exact, right, losses = [], [], []
    for part in parts:
        logits = modules.answer_logits(part.prompts, part.answers)
        losses.append(cross_entropy(logits.transpose(1, 2), part.answers, reduction="none")[part.counted])
        right.append((logits.argmax(-1) == part.answers)[part.counted])
        generated = modules.generate(part.prompts, part.answers.shape[1])
        exact.append(((generated == part.answers) | ~part.counted).all(dim=1))
    return {
        "exact_match": float(torch.cat(exact).double().mean()),
        "token_accuracy": float(torch.cat(right).double().mean()),
        "perplexity": float(torch.cat(losses).double().mean().exp()),
    }


def text_lesson(task: str, corpus: Corpus, tokenizer: tokenizers.Tokenizer, seed: int) -> TextLesson:
    if task not in FORMS:
        raise BadInput(f"expected one of {', '.join(FORMS)}", field="task", value=task)
    find = {"brackets": _brackets, "docstring": _docstrings}[task]
    parts = [list(dict.fromkeys(find(texts))) for texts in (corpus.training, corpus.evaluation)]
    if not all(parts):
        raise BadInput(f"expected text with examples of {task}", field="text", value=corpus.description)
    training, evaluation = (_examples(pairs, FORMS[task], tokenizer) for pairs in parts)
    return TextLesson(training, evaluation, seed)


def cut_at_brackets(line: str) -> tuple[str, str] | None:
    """The line up to the bracket that follows where most are open, and what closes them all; None if unclear."""
    if not line.isascii() or any(mark in line for mark in "\"'#"):
        return None
    open_brackets: list[str] = []
    deepest, begin = "", 0
    for place, letter in enumerate(line):
        if letter in CLOSING:
            open_brackets.append(CLOSING[letter])
            if len(open_brackets) > len(deepest):
                deepest, begin = "".join(reversed(open_brackets)), place + 1
        elif letter in ")]}" and (not open_brackets or open_brackets.pop() != letter):
            return None
    if len(deepest) not in DEPTHS:
        return None
    end = next((place for place in range(begin, len(line)) if line[place] in "()[]{}"), len(line))
    return line[:end], deepest


def _spread(examples: int, count: int) -> torch.Tensor:
    """`count` of the numbers of examples, or all, spread evenly: neighbours are much alike."""
    return torch.linspace(0, examples - 1, min(count, examples)).long()


def _brackets(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Lines of code with nested brackets, cut, and what closes them."""
    for text in texts:
        for line in text.splitlines():
            pair = cut_at_brackets(line.strip())
            if pair is not None and len(pair[0]) < FORMS["brackets"].prompt:
                yield pair


def _docstrings(texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Functions' headers up to the docstring's quotes, and the docstring's first line."""
    for text in texts:
        for header, line in DOCSTRING.findall(text):
            if line.strip():
                yield f'{header}\n    """', line.strip()


def _examples(pairs: Sequence[tuple[str, str]], form: Form, tokenizer: tokenizers.Tokenizer) -> Examples:
    (end,) = tokenizer.encode("\n").ids
    prompts = torch.full((len(pairs), form.prompt), end)
    answers = torch.full((len(pairs), form.answer), end)
    counted = torch.zeros(len(pairs), form.answer, dtype=torch.bool)
    for row, texts in enumerate(pairs):
        prompt, answer = (encoded.ids for encoded in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False))
        prompt, answer = prompt[-form.prompt :], answer[: form.answer]
        prompts[row, form.prompt - len(prompt) :] = torch.tensor(prompt)
        answers[row, : len(answer)] = torch.tensor(answer)
        counted[row, : len(answer) + 1] = True
    return Examples(prompts, answers, counted)


FIELDS = ("prompt", "answer")

PAIR_BATCH = 8
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
        return measure_examples(modules, _by_prompt_length(self.evaluation[:prompts], PAIR_BATCH))


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
            yield _padded_examples(group[begin : begin + limit])


def _padded_examples(pairs: Sequence[Pair]) -> Examples:
    sizes = torch.tensor([len(pair.answer) for pair in pairs])
    longest = int(sizes.max())
    answers = torch.tensor([pair.answer + [0] * (longest - len(pair.answer)) for pair in pairs])
    counted = torch.arange(longest) < sizes[:, None]
    return Examples(torch.tensor([pair.prompt for pair in pairs]), answers, counted)
