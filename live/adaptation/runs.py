"""One training with its files, and the measurement of what was trained: the parts of `twin adapt`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from live.adaptation.decomposition import Modules
from live.adaptation.directories import RECORD, SCHEMA, read_model, saved_state, write_model, write_record
from live.adaptation.forward import ForwardPass
from live.adaptation.recipes import Advance, Lesson, Trained, quiet, train_whole, tune_prefill
from live.adaptation.sizes import Size
from live.adaptation.tasks import BASE_OPERATIONS
from live.adaptation.training import TrainingSettings
from live.adaptation.tuning import Scope
from live.adaptation.weights import initial_weights, rounded
from live.models.checkpoint import SINGLE
from live.models.config import Family
from live.models.linear import Rounding
from live.models.weights import Weights
from reports.records.run_directory import naming
from workloads.errors import BadInput
from workloads.json_files import read_json_object

TRAININGS = ("base", "adaptation", "hard", "retuning", "hard_retuning")

Document = dict[str, Any]


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
    return _measured(directory, trained, {name: (modules, name) for name in BASE_OPERATIONS}, size, seed)


@dataclass(frozen=True)
class Adaptation:
    """One fine-tuning, as `twin adapt prefill` describes it.

    Attributes:
        model: directory of the base model. bits: of the decode module; None: as it is. start: directory of the module
            to begin with; None: the base model. steps, learning_rate: None: those of the base model's size, for a first
            tuning or for one that begins with `start`.
    """

    model: Path
    task: str
    method: Literal["sun", "full"] = "sun"
    scope: Scope = "all"
    rank: int = 8
    bits: int | None = None
    start: Path | None = None
    steps: int | None = None
    learning_rate: float | None = None
    seed: int = 0

    def settings(self) -> TrainingSettings:
        """The training's settings."""
        size = read_size(self.model)
        settings = size.fine_tuning(self.task) if self.start is None else size.tuning_again(self.task)
        settings = settings if self.steps is None else replace(settings, steps=self.steps)
        return settings if self.learning_rate is None else replace(settings, learning_rate=self.learning_rate)

    def identity(self) -> dict[str, object]:
        """Everything that the training depends on: models by the digests of their files."""
        fields: dict[str, object] = {name: value for name, value in asdict(self).items() if not isinstance(value, Path)}
        models = {"model": _digest(self.model), "start": _digest(self.start or self.model)}
        return {"kind": "adaptation", **fields, **models, "settings": asdict(self.settings())}


def run_adaptation(directory: Path, adaptation: Adaptation, advance: Advance = quiet) -> Document:
    """Tune a module and write it to a directory; goes on where it was stopped.

    Returns:
        The document of `training.json`, with `exact_match`.
    """
    config, base = read_model(adaptation.model)
    start = base if adaptation.start is None else _same_shape(adaptation.start, adaptation.model)
    forward, size = ForwardPass(config), read_size(adaptation.model)
    lesson, settings = Lesson((adaptation.task,), size.digits, adaptation.seed), adaptation.settings()
    lesson.batch(1, 0)  # refuses an unknown task before anything is written
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
    decoder = f", decoder of {adaptation.bits} bits" if adaptation.bits else ""
    name = f"{adaptation.task}, {adaptation.method}{decoder}"
    _record(directory, name, size, adaptation.seed, trained, adaptation=adaptation.identity())
    modules = Modules(forward, trained.weights, decode)
    return _measured(directory, trained, {adaptation.task: (modules, adaptation.task)}, size, adaptation.seed)


def evaluate(prefill: Path, decode: Path, task: str, bits: int | None, prompts: int, seed: int) -> Document:
    """Exact match of a prefill module with a decode module, which is rounded to `bits` first."""
    config, decoder = read_model(decode)
    first = _same_shape(prefill, decode)
    if bits is not None:
        decoder = rounded(config, decoder, Rounding(bits))
    lesson = Lesson((task,), read_size(decode).digits, seed)
    share = lesson.exact_match(Modules(ForwardPass(config), first, decoder), prompts)
    return {"schema": SCHEMA, "task": task, "bits": bits, "prompts": prompts, "seed": seed, "exact_match": share}


def read_size(directory: Path) -> Size:
    """The size in a directory's `training.json`."""
    file = directory / RECORD
    size = read_json_object(file).get("size")
    try:
        fields: Any = dict(size or {})
        trainings: dict[str, Any] = {name: TrainingSettings(**fields.pop(name)) for name in TRAININGS}
        return Size(**fields, **trainings)
    except (KeyError, TypeError, ValueError):
        raise BadInput("expected the size that twin adapt writes", field="size", value=size, file=file) from None


def _record(directory: Path, name: str, size: Size, seed: int, trained: Trained, **more: object) -> None:
    document = {"schema": SCHEMA, "name": name, "size": asdict(size), "seed": seed, "losses": trained.losses}
    write_record(directory, document | more)


def _measured(
    directory: Path, trained: Trained, cases: dict[str, tuple[Modules, str]], size: Size, seed: int
) -> Document:
    """The stored document, with the exact match of each case and the number of trained values."""
    document = read_json_object(directory / RECORD)
    document["trained_parameters"] = trained.trained_parameters
    document["exact_match"] = {
        name: Lesson((task,), size.digits, seed).exact_match(modules, size.prompts)
        for name, (modules, task) in cases.items()
    }
    return document


def _same_shape(directory: Path, reference: Path) -> Weights:
    """The weights of a directory whose config equals another's."""
    config, weights = read_model(directory)
    if config != read_model(reference)[0]:
        raise BadInput(f"expected the config of {reference}: modules of one architecture", file=directory)
    return weights


def _digest(directory: Path) -> str:
    with naming(directory / SINGLE):
        return hashlib.sha256((directory / SINGLE).read_bytes()).hexdigest()[:16]
