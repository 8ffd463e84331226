"""One training with its files, and the measurement of what was trained: the parts of `twin adapt`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.options import Adaptation, Subject
from live.adaptation.tasks import BASE_OPERATIONS, Lesson, Size
from live.adaptation.text_lessons import PairLesson, pair_lesson
from live.adaptation.training import (
    RECORD,
    SCHEMA,
    Advance,
    Trained,
    TrainingSettings,
    quiet,
    train_into,
    write_record,
)
from live.adaptation.weights import copy_text_files, initial_weights, read_model, rounded
from live.models.checkpoint import weight_files
from live.models.config import Family, ModelConfig
from live.models.weights import Weights
from reports.run_directory import naming
from workloads.errors import BadInput
from workloads.json_files import read_json_object

PAIR_TRAINING = TrainingSettings(steps=200, batch_size=8, learning_rate=5e-5)
"""The training on prompts and answers of one's own: the highest rate that appendix A.1 searches."""

PAIR_PROMPTS = 1024
"""Held-out pairs of an evaluation, at most."""

Document = dict[str, Any]


def train_base(
    directory: Path, size: Size, family: Family, seed: int, advance: Advance = quiet
) -> tuple[Trained, Modules]:
    """Train a base model on the eight base operations, and write it to a directory; goes on where it was stopped."""
    config = size.config(family)
    forward = ForwardPass(config)
    of_base = {name: value for name, value in asdict(size).items() if name in ("layers", "hidden", "digits", "base")}
    identity = {"kind": "base", "size": of_base, "family": family, "seed": seed}
    lesson, start = Lesson(tuple(BASE_OPERATIONS), size.digits, seed), initial_weights(config, seed)
    trained = train_into(directory, identity, forward, start, None, lesson, size.base, advance=advance)
    record = {"schema": SCHEMA, "name": "base", "seed": seed, "losses": trained.losses, "size": asdict(size)}
    write_record(directory, record)
    return trained, Modules(forward, trained.weights, trained.weights)


def run_base(directory: Path, size: Size, family: Family, seed: int, advance: Advance = quiet) -> Document:
    """Train a base model as `train_base`, and measure it: the document of `training.json` with `exact_match`."""
    trained, modules = train_base(directory, size, family, seed, advance)
    lessons = {name: Lesson((name,), size.digits, seed) for name in BASE_OPERATIONS}
    return _measured(
        directory, trained, {name: lesson.measure(modules, size.prompts) for name, lesson in lessons.items()}
    )


def settings_of(model: Path, adaptation: Adaptation) -> TrainingSettings:
    """The training that an adaptation asks for, by the size of the base model in a directory."""
    if adaptation.task is None:
        settings = PAIR_TRAINING
    else:
        size = read_size(model)
        settings = (size.fine_tuning if adaptation.start is None else size.tuning_again)(adaptation.task)
    changed = {name: getattr(adaptation, name) for name in ("steps", "learning_rate")}
    return replace(settings, **{name: value for name, value in changed.items() if value is not None})


def run_adaptation(
    model: Path, directory: Path, adaptation: Adaptation, seed: int, advance: Advance = quiet
) -> Document:
    """Tune a module into a directory, also from where it was stopped; returns `training.json` and `exact_match`."""
    config, base = read_model(model)
    if config.quantisation is not None:
        raise BadInput("expected dense weights", field="quantization_config", file=model)
    if directory.resolve() == model.resolve():
        raise BadInput("expected another directory than the base model's", value=str(directory))
    start = base if adaptation.start is None else _same_shape(adaptation.start, model)
    forward, settings = ForwardPass(config), settings_of(model, adaptation)
    lesson = _lesson(adaptation, model, config, seed)
    identity = _identity(model, adaptation, settings, seed)
    decode = None if adaptation.method == "full" else rounded(base, adaptation.bits)
    trained = train_into(
        directory, identity, forward, start, decode, lesson, settings,
        scope=adaptation.scope, rank=adaptation.rank, advance=advance,
    )  # fmt: skip
    copy_text_files(model, directory)
    decoder = f", decoder of {adaptation.bits} bits" if adaptation.bits else ""
    name = f"{adaptation.name}, {adaptation.method}{decoder}"
    document: Document = {"schema": SCHEMA, "name": name, "seed": seed, "losses": trained.losses}
    prompts = PAIR_PROMPTS
    if adaptation.task is not None:
        size = read_size(model)
        document["size"], prompts = asdict(size), size.prompts
    write_record(directory, document | {"adaptation": identity})
    modules = Modules(forward, trained.weights, trained.weights if decode is None else decode)
    return _measured(directory, trained, {adaptation.name: lesson.measure(modules, prompts)})


def _identity(model: Path, adaptation: Adaptation, settings: TrainingSettings, seed: int) -> Document:
    """Everything that a training depends on: models and data by the digests of their files."""
    data, options = adaptation.data, asdict(adaptation) | {"seed": seed}
    absent = ("data",) if data is None else ("data", "task")
    fields = {name: value for name, value in options.items() if not isinstance(value, Path) and name not in absent}
    files = {"model": _digest(weight_files(model)), "start": _digest(weight_files(adaptation.start or model))}
    if data is not None:
        files["task"] = _digest([data])
    return {"kind": "adaptation", **fields, **files, "settings": asdict(settings)}


def evaluate(prefill: Path, decode: Path, subject: Subject, bits: int | None, prompts: int, seed: int) -> Document:
    """Exact match of a prefill with a rounded decode module; of pairs also right tokens and perplexity."""
    config, decoder = read_model(decode)
    modules = Modules(ForwardPass(config), _same_shape(prefill, decode), rounded(decoder, bits))
    lesson = _lesson(subject, decode, config, seed)
    if isinstance(lesson, PairLesson):
        prompts = min(prompts, len(lesson.evaluation))
    measures = lesson.measure(modules, prompts)
    return {"schema": SCHEMA, "task": subject.name, "bits": bits, "prompts": prompts, "seed": seed, **measures}


def _lesson(subject: Subject, model: Path, config: ModelConfig, seed: int) -> Lesson | PairLesson:
    """The data of a task. Unknown tasks and wrong files are refused."""
    if subject.data is not None:
        return pair_lesson(subject.data, model, config, seed)
    lesson = Lesson((subject.name,), read_size(model).digits, seed)
    lesson.batch(1, 0)
    return lesson


def read_size(directory: Path) -> Size:
    file = directory / RECORD
    size = read_json_object(file).get("size")
    try:
        return TypeAdapter(Size).validate_python(size)
    except ValidationError:
        raise BadInput("expected the size that twin adapt writes", field="size", value=size, file=file) from None


def _measured(directory: Path, trained: Trained, measures: dict[str, dict[str, float]]) -> Document:
    """The stored document, with the number of trained values and the measures of each task."""
    document = read_json_object(directory / RECORD)
    document["trained_parameters"] = trained.trained_parameters
    for task, values in measures.items():
        for measure, value in values.items():
            document.setdefault(measure, {})[task] = value
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
