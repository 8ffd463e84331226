"""`twin reproduce sun --quality`: base models, and each adapted to tasks in the ways that the paper compares.

SUN and the variants that it is compared with, on one task that the base model has not seen.

                    prefill module              decode module
    base            base                        base
    full            fine-tuned                  the same weights (full fine-tuning)
    naive           fine-tuned                  base (naive sharing, figure 2)
    sun             tuned for the decode module base (Table 1)
    sun_attention   the same, attention only    base
    sun_low_rank    the same, of low rank       base
    full_awq4       fine-tuned, 4 bits          the same weights, 4 bits (Table 2)
    sun_awq4        of sun                      base in 4 bits (Table 3, SUN+AWQ-d)
    qsun_awq4       of sun, tuned again for it  base in 4 bits (Table 2)

and the last three with other quantisers and with 3 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.language_model import (
    TEXT_SIZES,
    TextSize,
    read_corpus,
    read_tokenizer,
    text_data,
    train_text_model,
)
from live.adaptation.quantisers import METHODS, Method, Precision, quantise_model
from live.adaptation.runs import train_base
from live.adaptation.tasks import BASE_OPERATIONS, NEW_OPERATIONS, SIZES, Lesson, Size
from live.adaptation.text_lessons import FORMS, TextLesson, text_lesson
from live.adaptation.training import Trained, TrainingSettings, curve, tune
from live.adaptation.weights import Scope, read_model
from live.models.weights import Weights
from papers.common import Recipe, Study, language_model_row, study_sizes
from papers.sun.quality import summarise

Row = dict[str, Any]

LOW_RANK = 8

GROUP = 128
"""Inputs that share a scale in a decode module of few bits, as in the paper."""


@dataclass(frozen=True)
class Comparison:
    """A base model that is adapted to a task in every way that is compared.

    `calibration`: sequences for quantisers, (sequences, n) int64. `retuning`: QSUN's, from where SUN's ended. `scopes`:
    parts of the prefill module that are tuned alone.
    """

    forward: ForwardPass
    base: Weights
    task: Lesson | TextLesson
    calibration: torch.Tensor
    adaptation: TrainingSettings
    retuning: TrainingSettings
    quantised: tuple[tuple[Method, int], ...]
    scopes: tuple[Scope, ...]
    prompts: int

    def variants(self) -> dict[str, Row]:
        """Every variant with its measures; where it was trained, with its loss curve."""
        return dict(self._variants())

    def _variants(self) -> Iterator[tuple[str, Row]]:
        base = self.base
        yield "base", self._row(base, base)
        full = tune(self.forward, base, None, self.task, self.adaptation)
        yield "full", self._row(full.weights, full.weights, full)
        yield "naive", self._row(full.weights, base)
        sun = self._tuned(base, base, self.adaptation)
        yield "sun", self._row(sun.weights, base, sun)
        for scope in self.scopes:
            part = self._tuned(base, base, self.adaptation, scope)
            yield f"sun_{scope}", self._row(part.weights, base, part)
        for method, bits in self.quantised:
            quantised = self._quantised(full.weights, method, bits, self.task.sequences(len(self.calibration)))
            decode = self._quantised(base, method, bits, self.calibration)
            yield f"full_{method}{bits}", self._row(quantised, quantised)
            yield f"sun_{method}{bits}", self._row(sun.weights, decode)
            again = self._tuned(sun.weights, decode, self.retuning)
            yield f"qsun_{method}{bits}", self._row(again.weights, decode, again)

    def _row(self, prefill: Weights, decode: Weights, trained: Trained | None = None) -> Row:
        row: Row = dict(self.task.measure(Modules(self.forward, prefill, decode), self.prompts))
        if trained:
            row |= {"losses": curve(trained.losses), "trained_parameters": trained.trained_parameters}
        return row

    def _tuned(self, start: Weights, decode: Weights, settings: TrainingSettings, scope: Scope = "all") -> Trained:
        return tune(self.forward, start, decode, self.task, settings, scope=scope, rank=LOW_RANK)

    def _quantised(self, weights: Weights, method: Method, bits: int, sequences: torch.Tensor) -> Weights:
        """All linear layers in few bits, unpacked to dense tensors once and not in every step of a training."""
        return quantise_model(self.forward, weights, method, Precision(bits, GROUP), sequences).weights()


TASKS = tuple(NEW_OPERATIONS)

TEXT_TASKS = tuple(FORMS)

QUANTISED: tuple[tuple[Method, int], ...] = tuple((method, bits) for bits in (4, 3) for method in METHODS)

TEXT_QUANTISED: tuple[tuple[Method, int], ...] = (("awq", 4), ("awq", 3))
"""Decode modules in few bits on tasks of text, where a training takes five times as long."""

SCOPES: tuple[Scope, ...] = ("attention", "low_rank")
"""Parts of the prefill module that are tuned alone, with the first seed only: they cost as much as SUN itself."""

CALIBRATION = 256
"""Sequences that GPTQ and AWQ see."""


@dataclass(frozen=True)
class TextStudy:
    """A language model, and the trainings that adapt it to tasks of text, as in `live.adaptation.tasks.Size`."""

    model: TextSize
    adaptation: TrainingSettings
    retuning: TrainingSettings
    prompts: int = 256


@dataclass(frozen=True)
class StudySize:
    """Sizes of the studies on sequence operations and on text."""

    operations: Size
    text: TextStudy


TEXT_STUDIES = study_sizes(TextStudy, "sun", model=TEXT_SIZES)
STUDY_SIZES = {name: StudySize(SIZES[name], TEXT_STUDIES[name]) for name in SIZES}


def train_operations(name: str, seed: int, directory: Path) -> Row:
    """Train a base model, and measure it on its own operations."""
    torch.set_num_threads(1)
    size = STUDY_SIZES[name].operations
    trained, modules = train_base(directory, size, "llama", seed)
    return {
        "kind": "base",
        "seed": seed,
        "exact_match": {
            operation: Lesson((operation,), size.digits, seed).exact_match(modules, size.prompts)
            for operation in BASE_OPERATIONS
        },
        "parameters": trained.trained_parameters,
        "losses": curve(trained.losses),
    }


def adapt_to_operation(task: str, name: str, seed: int, base: Path) -> Row:
    """Adapt a finished base model to a sequence operation in every way, and measure."""
    torch.set_num_threads(1)
    config, weights = read_model(base)
    size = STUDY_SIZES[name].operations
    compared = Comparison(
        ForwardPass(config), weights, Lesson((task,), size.digits, seed),
        Lesson(tuple(BASE_OPERATIONS), size.digits, seed).sequences(CALIBRATION),
        size.fine_tuning(task), size.tuning_again(task), QUANTISED, SCOPES if seed == 0 else (), size.prompts,
    )  # fmt: skip
    return {"kind": "task", "seed": seed, "task": task, "variants": compared.variants()}


def train_text(name: str, seed: int, directory: Path) -> Row:
    torch.set_num_threads(1)
    model = train_text_model(directory, STUDY_SIZES[name].text.model, "llama", seed)
    return language_model_row("text_base", seed, model.document)


def adapt_to_text(task: str, name: str, seed: int, base: Path) -> Row:
    """Adapt a finished language model to a task of text in every way, and measure."""
    torch.set_num_threads(1)
    config, weights = read_model(base)
    tokenizer, corpus, size = read_tokenizer(base), read_corpus(), STUDY_SIZES[name].text
    data = text_data(tokenizer, corpus.training, corpus.evaluation, size.model.window)
    compared = Comparison(
        ForwardPass(config), weights, text_lesson(task, corpus, tokenizer, seed),
        data.batch(CALIBRATION, seed, size.model.training.steps),
        size.adaptation, size.retuning, TEXT_QUANTISED, (), size.prompts,
    )  # fmt: skip
    return {"kind": "text_task", "seed": seed, "task": task, "variants": compared.variants()}


def recipes(_: str) -> Sequence[Recipe]:
    """A base model and a language model a seed, and their tasks; alike in every size."""
    return (
        Recipe("base", "base", train_operations, {task: partial(adapt_to_operation, task) for task in TASKS}),
        Recipe("text base", "text", train_text, {task: partial(adapt_to_text, task) for task in TEXT_TASKS}),
    )


STUDY = Study(STUDY_SIZES, recipes, summarise)
