"""One training with its files, and the measurement of what was trained: the parts of `twin adapt`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.tasks import BASE_OPERATIONS, Lesson, Size
from live.adaptation.text_lessons import PairLesson, pair_lesson
from live.adaptation.training import (
    RECORD,
    SCHEMA,
    Advance,
    Trained,
    TrainingSettings,
    quiet,
    saved_state,
    train_whole,
    tune_prefill,
    write_record,
)
from live.adaptation.weights import Scope, copy_text_files, initial_weights, read_model, rounded, write_model
from live.models.checkpoint import weight_files
from live.models.config import Family, ModelConfig
from live.models.linear import Rounding
from live.models.weights import Weights
from reports.run_directory import naming
from workloads.errors import BadInput
from workloads.json_files import read_json_object

TRAININGS = ("base", "adaptation", "hard", "retuning", "hard_retuning")

PAIR_TRAINING = TrainingSettings(steps=200, batch_size=8, learning_rate=5e-5)
"""The training on prompts and answers of one's own: the highest rate that appendix A.1 searches."""

PAIR_PROMPTS = 1024
"""Held-out pairs of an evaluation, at most."""

Document = dict[str, Any]

Task: TypeAlias = str | Path
"""A sequence operation of a base model of `twin adapt base`, or a JSONL file of prompts and answers for any model."""


def train_base(
    directory: Path, size: Size, family: Family, seed: int, advance: Advance = quiet
) -> tuple[Trained, ForwardPass]:
    """Train a base model on the eight base operations, and write it to a directory; goes on where it was stopped."""
    config = size.config(family)
    forward = ForwardPass(config)
    of_base = {name: value for name, value in asdict(size).items() if name in ("layers", "hidden", "digits", "base")}
    identity = {"kind": "base", "size": of_base, "family": family, "seed": seed}
    lesson = Lesson(tuple(BASE_OPERATIONS), size.digits, seed)
    state = saved_state(directory, identity)
    trained = train_whole(forward, initial_weights(config, seed), lesson, size.base, state, advance)
    write_model(directory, config, trained.weights)
    _record(directory, "base", size, seed, trained)
    return trained, forward


def run_base(directory: Path, size: Size, family: Family, seed: int, advance: Advance = quiet) -> Document:
    """Train a base model as `train_base`, and measure it: the document of `training.json` with `exact_match`."""
    trained, forward = train_base(directory, size, family, seed, advance)
    modules = Modules(forward, trained.weights, trained.weights)
    lessons = {name: Lesson((name,), size.digits, seed) for name in BASE_OPERATIONS}
    return _measured(directory, trained, modules, lessons, size.prompts)


@dataclass(frozen=True)
class Adaptation:
    """One fine-tuning, as `twin adapt prefill` describes it.

    `task`: an operation, or a file of pairs. `bits`: of the decode module. `start`: directory to begin with; None: the
    base model. `steps`, `learning_rate`: None: those of the base model's size, or of `PAIR_TRAINING`.
    """

    model: Path
    task: Task
    method: Literal["sun", "full"] = "sun"
    scope: Scope = "all"
    rank: int = 8
    bits: int | None = None
    start: Path | None = None
    steps: int | None = None
    learning_rate: float | None = None
    seed: int = 0

    def settings(self) -> TrainingSettings:
        if isinstance(self.task, Path):
            settings = PAIR_TRAINING
        else:
            size = read_size(self.model)
            settings = size.fine_tuning(self.task) if self.start is None else size.tuning_again(self.task)
        settings = settings if self.steps is None else replace(settings, steps=self.steps)
        return settings if self.learning_rate is None else replace(settings, learning_rate=self.learning_rate)

    def identity(self) -> dict[str, object]:
        """Everything that the training depends on: models by the digests of their files."""
        fields: dict[str, object] = {name: value for name, value in asdict(self).items() if not isinstance(value, Path)}
        files = {"model": _digest(weight_files(self.model)), "start": _digest(weight_files(self.start or self.model))}
        if isinstance(self.task, Path):
            files["task"] = _digest([self.task])
        return {"kind": "adaptation", **fields, **files, "settings": asdict(self.settings())}


def run_adaptation(directory: Path, adaptation: Adaptation, advance: Advance = quiet) -> Document:
    """Tune a module into a directory, also from where it was stopped; returns `training.json` and `exact_match`."""
    config, base = read_model(adaptation.model)
    if config.quantisation is not None:
        raise BadInput("expected dense weights", field="quantization_config", file=adaptation.model)
    if directory.resolve() == adaptation.model.resolve():
        raise BadInput("expected another directory than the base model's", value=str(directory))
    start = base if adaptation.start is None else _same_shape(adaptation.start, adaptation.model)
    forward, settings = ForwardPass(config), adaptation.settings()
    lesson = _lesson(adaptation.task, adaptation.model, config, adaptation.seed)
    size = None if isinstance(lesson, PairLesson) else read_size(adaptation.model)
    decode = base if adaptation.bits is None else rounded(config, base, Rounding(adaptation.bits))
    state = saved_state(directory, adaptation.identity())
    if adaptation.method == "full":
        trained = train_whole(forward, start, lesson, settings, state, advance)
        decode = trained.weights
    else:
        trained = tune_prefill(
            forward, start, decode, lesson, settings,
            scope=adaptation.scope, rank=adaptation.rank, state=state, advance=advance,
        )  # fmt: skip
    write_model(directory, config, trained.weights)
    copy_text_files(adaptation.model, directory)
    decoder = f", decoder of {adaptation.bits} bits" if adaptation.bits else ""
    name = f"{adaptation.task}, {adaptation.method}{decoder}"
    _record(directory, name, size, adaptation.seed, trained, adaptation=adaptation.identity())
    modules = Modules(forward, trained.weights, decode)
    return _measured(
        directory, trained, modules, {str(adaptation.task): lesson}, size.prompts if size else PAIR_PROMPTS
    )


def evaluate(prefill: Path, decode: Path, task: Task, bits: int | None, prompts: int, seed: int) -> Document:
    """Exact match of a prefill with a rounded decode module; of pairs also right tokens and perplexity."""
    config, decoder = read_model(decode)
    first = _same_shape(prefill, decode)
    if bits is not None:
        decoder = rounded(config, decoder, Rounding(bits))
    lesson = _lesson(task, decode, config, seed)
    if isinstance(lesson, PairLesson):
        prompts = min(prompts, len(lesson.evaluation))
    measures = lesson.measure(Modules(ForwardPass(config), first, decoder), prompts)
    return {"schema": SCHEMA, "task": str(task), "bits": bits, "prompts": prompts, "seed": seed, **measures}


def _lesson(task: Task, model: Path, config: ModelConfig, seed: int) -> Lesson | PairLesson:
    """The data of a task. Unknown tasks and wrong files are refused."""
    if isinstance(task, Path):
        return pair_lesson(task, model, config, seed)
    lesson = Lesson((task,), read_size(model).digits, seed)
    lesson.batch(1, 0)
    return lesson


def read_size(directory: Path) -> Size:
    file = directory / RECORD
    size = read_json_object(file).get("size")
    try:
        fields: Any = dict(size or {})
        trainings: dict[str, Any] = {name: TrainingSettings(**fields.pop(name)) for name in TRAININGS}
        return Size(**fields, **trainings)
    except (KeyError, TypeError, ValueError):
        raise BadInput("expected the size that twin adapt writes", field="size", value=size, file=file) from None


def _record(directory: Path, name: str, size: Size | None, seed: int, trained: Trained, **more: object) -> None:
    document: Document = {"schema": SCHEMA, "name": name, "seed": seed, "losses": trained.losses}
    if size is not None:
        document["size"] = asdict(size)
    write_record(directory, document | more)


def _measured(
    directory: Path, trained: Trained, modules: Modules, lessons: Mapping[str, Lesson | PairLesson], prompts: int
) -> Document:
    """The stored document, with the number of trained values and the measures of each lesson by their names."""
    document = read_json_object(directory / RECORD)
    document["trained_parameters"] = trained.trained_parameters
    for name, lesson in lessons.items():
        for measure, value in lesson.measure(modules, prompts).items():
            document.setdefault(measure, {})[name] = value
    return document


def _same_shape(directory: Path, reference: Path) -> Weights:
    config, weights = read_model(directory)
    if config != read_model(reference)[0]:
        raise BadInput(f"expected the config of {reference}: modules of one architecture", file=directory)
    return weights


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with naming(file):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
