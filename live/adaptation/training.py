"""Trainings: of a base model, full fine-tuning, and prefill-only tuning against a frozen decode module.

The loop is AdamW with a linear schedule, deterministic, and resumable from a file. A batch is a function of its step,
so a training that goes on from a saved state computes what an uninterrupted one computes, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import yaml
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.weights import Scope, TunedWeights, write_model
from live.models.weights import Weights
from reports.run_directory import naming, replacing, write_text
from workloads.errors import BadInput

T = TypeVar("T")
SCHEMA = "twin.adaptation/1"
RECORD = "training.json"
STATE = "training.safetensors"


def read_sizes(kind: type[T], section: str) -> dict[str, T]:
    """The sizes of one kind of model by their names, of `sizes.yaml`."""
    document = yaml.safe_load((Path(__file__).parent / "sizes.yaml").read_text(encoding="utf-8"))
    return TypeAdapter(dict[str, kind]).validate_python(document[section])  # type: ignore[valid-type]


def write_record(directory: Path, document: dict[str, Any]) -> None:
    """Write what was trained, `training.json`."""
    write_text(directory / RECORD, json.dumps(document, indent=1) + "\n")


SAVE_EVERY = 100
"""Steps between two saved states."""

CURVE_POINTS = 50
"""Points of a stored loss curve, each the mean of its share of the steps."""


@dataclass(frozen=True)
class TrainingSettings:
    """Steps and optimizer (appendix A.1: AdamW, a linear schedule, a warmup ratio of 0.1); `clip`: a step's norm."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: up to `learning_rate`, then down to 0 after the last step."""
        ramp = max(round(self.warmup * self.steps), 1)
        if step < ramp:
            return self.learning_rate * (step + 1) / ramp
        return self.learning_rate * (self.steps - step) / (self.steps - ramp)


@dataclass(frozen=True)
class SavedState:
    """A training's state in a file, and all that the training depends on: what it may be resumed by."""

    file: Path
    identity: Mapping[str, object] = field(default_factory=dict)

    def load(self, trained: dict[str, torch.Tensor], optimizer: torch.optim.AdamW) -> list[float]:
        """Fill in the tensors and the optimizer's state; returns the losses so far, none without a file."""
        if not self.file.exists():
            return []
        try:
            with safe_open(self.file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.offset_keys()}
        except (OSError, SafetensorError) as error:
            raise BadInput(f"expected a training's state ({error})", file=self.file) from None
        if metadata.get("identity") != self._identity():
            raise BadInput("expected the state of the same training: remove it to start anew", file=self.file)
        losses: list[float] = json.loads(metadata["losses"])
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(tensors[name])
                optimizer.state[tensor] = {
                    "step": torch.tensor(float(len(losses))),
                    "exp_avg": tensors[f"{name}:mean"],
                    "exp_avg_sq": tensors[f"{name}:square"],
                }
        return losses

    def save(self, trained: dict[str, torch.Tensor], optimizer: torch.optim.AdamW, losses: list[float]) -> None:
        """Write the state atomically."""
        tensors = {name: tensor.detach() for name, tensor in trained.items()}
        for name, tensor in trained.items():
            state = optimizer.state[tensor]
            tensors |= {f"{name}:mean": state["exp_avg"], f"{name}:square": state["exp_avg_sq"]}
        with replacing(self.file) as draft:
            save_file(tensors, draft, {"identity": self._identity(), "losses": json.dumps(losses)})

    def _identity(self) -> str:
        return json.dumps(self.identity, sort_keys=True)


Advance = Callable[[str], None]


def quiet(text: str) -> None:
    """Show no progress."""


def train(
    trained: dict[str, torch.Tensor],
    loss: Callable[[int], torch.Tensor],
    settings: TrainingSettings,
    state: SavedState | None = None,
    advance: Advance = quiet,
) -> list[float]:
    """Minimise `loss`, a function of the step, over leaves of autograd's graph, in place; returns every step's loss."""
    parameters = list(trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    losses = state.load(trained, optimizer) if state else []
    for step in range(len(losses), settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        losses.append(value.item())
        advance(f"loss {losses[-1]:.3f}")
        if state and (len(losses) % SAVE_EVERY == 0 or len(losses) == settings.steps):
            state.save(trained, optimizer, losses)
    return losses


def curve(losses: list[float]) -> list[float]:
    """A loss curve of at most `CURVE_POINTS` points."""
    chunks = torch.tensor(losses).tensor_split(max(min(CURVE_POINTS, len(losses)), 1))
    return [round(float(chunk.mean()), 5) for chunk in chunks]


class Teacher(Protocol):
    """The data of a training, all of it drawn from a seed."""

    @property
    def seed(self) -> int: ...

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        """The loss of a training step on a batch of `size` prompts, a scalar; equal arguments draw the same."""


@dataclass(frozen=True)
class Trained:
    """The weights that a training ends with, the loss of each step, and the number of values that were trained."""

    weights: Weights
    losses: list[float]
    trained_parameters: int


def tune(
    forward: ForwardPass,
    start: Weights,
    decode: Weights | None,
    lesson: Teacher,
    settings: TrainingSettings,
    *,
    scope: Scope = "all",
    rank: int = 8,
    state: SavedState | None = None,
    advance: Advance = quiet,
) -> Trained:
    """Train a prefill module, from `start`, for the frozen decode module (section 3.2.2; QSUN if that is quantised).

    Without a decode module what is trained decodes, too: a base model, or full fine-tuning.
    """
    tuned = TunedWeights(start, scope, rank, lesson.seed)

    def loss(step: int) -> torch.Tensor:
        weights = tuned.weights()
        return lesson.loss(Modules(forward, weights, weights if decode is None else decode), settings.batch_size, step)

    losses = train(tuned.trained, loss, settings, state, advance)
    return Trained(tuned.frozen(), losses, tuned.trained_parameters)


def train_into(
    directory: Path, identity: dict[str, object], forward: ForwardPass, *data: Any, **options: Any
) -> Trained:
    """Train as `tune`, with its further arguments, and write the model to a directory, also from where it was stopped.

    `identity`: all that the training depends on.
    """
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    trained = tune(forward, *data, state=SavedState(directory / STATE, identity), **options)
    write_model(directory, forward.config, trained.weights)
    return trained
