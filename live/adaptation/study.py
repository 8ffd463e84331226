"""The jobs of `twin reproduce sun --quality`: base models, and the tasks that each is adapted to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from live.adaptation.comparison import Comparison
from live.adaptation.decomposition import Modules
from live.adaptation.directories import read_model
from live.adaptation.forward import ForwardPass
from live.adaptation.quantisers.models import METHODS, Method
from live.adaptation.recipes import Lesson
from live.adaptation.runs import train_base
from live.adaptation.sizes import SIZES, Size
from live.adaptation.tasks import BASE_OPERATIONS, NEW_OPERATIONS
from live.adaptation.text.corpus import standard_library
from live.adaptation.text.language_model import text_data
from live.adaptation.text.runs import train_text_model
from live.adaptation.text.sizes import TEXT_STUDIES, TextStudy
from live.adaptation.text.tasks import FORMS, text_lesson
from live.adaptation.text.tokenizer import read_tokenizer
from live.adaptation.training import curve
from live.adaptation.tuning import Scope

Row = dict[str, Any]

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
class StudySize:
    """Sizes of the studies on sequence operations and on text."""

    operations: Size
    text: TextStudy


STUDY_SIZES = {name: StudySize(SIZES[name], TEXT_STUDIES[name]) for name in SIZES}


@dataclass(frozen=True)
class BaseJob:
    """A base model to train: into `directory`, which a later job may find finished or half done."""

    size: str
    seed: int
    directory: Path

    def run(self) -> Row:
        """Train it, write it, and measure it on its own operations."""
        torch.set_num_threads(1)
        size = STUDY_SIZES[self.size].operations
        trained, forward = train_base(self.directory, size, "llama", self.seed)
        modules = Modules(forward, trained.weights, trained.weights)
        return {
            "kind": "base",
            "seed": self.seed,
            "exact_match": {
                name: Lesson((name,), size.digits, self.seed).exact_match(modules, size.prompts)
                for name in BASE_OPERATIONS
            },
            "parameters": trained.trained_parameters,
            "losses": curve(trained.losses),
        }


@dataclass(frozen=True)
class TaskJob:
    """A sequence operation to adapt a finished base model to."""

    size: str
    seed: int
    task: str
    base: Path

    def run(self) -> Row:
        """Train and measure all variants."""
        torch.set_num_threads(1)
        config, weights = read_model(self.base)
        size = STUDY_SIZES[self.size].operations
        compared = Comparison(
            ForwardPass(config), weights, Lesson((self.task,), size.digits, self.seed),
            Lesson(tuple(BASE_OPERATIONS), size.digits, self.seed).sequences(CALIBRATION),
            size.fine_tuning(self.task), size.tuning_again(self.task), QUANTISED, SCOPES if self.seed == 0 else (),
            size.prompts,
        )  # fmt: skip
        return {"kind": "task", "seed": self.seed, "task": self.task, "variants": compared.variants()}


@dataclass(frozen=True)
class TextBaseJob:
    """A language model to train, as `BaseJob`."""

    size: str
    seed: int
    directory: Path

    def run(self) -> Row:
        """Train it and write it."""
        torch.set_num_threads(1)
        _, document = train_text_model(self.directory, STUDY_SIZES[self.size].text.model, "llama", self.seed)
        return {
            "kind": "text_base",
            "seed": self.seed,
            "perplexity": document["perplexity"],
            "parameters": document["trained_parameters"],
            "corpus": document["corpus"],
            "losses": curve(document["losses"]),
        }


@dataclass(frozen=True)
class TextTaskJob:
    """A task of text to adapt a finished language model to."""

    size: str
    seed: int
    task: str
    base: Path

    def run(self) -> Row:
        """Train and measure all variants."""
        torch.set_num_threads(1)
        config, weights = read_model(self.base)
        tokenizer, corpus, size = read_tokenizer(self.base), standard_library(), STUDY_SIZES[self.size].text
        data = text_data(tokenizer, corpus.training, corpus.evaluation, size.model.window)
        compared = Comparison(
            ForwardPass(config), weights, text_lesson(self.task, corpus, tokenizer, self.seed),
            data.batch(CALIBRATION, self.seed, size.model.training.steps),
            size.adaptation, size.retuning, TEXT_QUANTISED, (), size.prompts,
        )  # fmt: skip
        return {"kind": "text_task", "seed": self.seed, "task": self.task, "variants": compared.variants()}
