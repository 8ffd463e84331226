"""The trainings: a base model, full fine-tuning, and prefill-only tuning against a frozen decode module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.tasks import draw
from live.adaptation.training import SavedState, TrainingSettings, train
from live.adaptation.weights import Scope, TunedWeights
from live.models.weights import Weights

Advance = Callable[[str], None]


def quiet(text: str) -> None:
    """Show no progress."""


class Teacher(Protocol):
    """The data of a training, all of it drawn from a seed."""

    @property
    def seed(self) -> int: ...

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        """The loss of a training step on a batch of `size` prompts, a scalar; equal arguments draw the same."""


@dataclass(frozen=True)
class Lesson:
    """Prompts of some digits with their answers, each by one of the operations, drawn from a seed."""

    operations: tuple[str, ...]
    digits: int
    seed: int

    def batch(self, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(self.operations, self.digits, size, self.seed, step)

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        return modules.loss(*self.batch(size, step))

    def exact_match(self, modules: Modules, prompts: int) -> float:
        """The share of right answers to prompts that no training draws."""
        return modules.exact_match(*draw(self.operations, self.digits, prompts, self.seed, 0, "evaluation"))

    def measure(self, modules: Modules, prompts: int) -> dict[str, float]:
        return {"exact_match": self.exact_match(modules, prompts)}

    def sequences(self, count: int) -> torch.Tensor:
        """Prompts with their answers from the training part, (count, n)."""
        return torch.cat(self.batch(count, 0), dim=1)


@dataclass(frozen=True)
class Trained:
    """The weights that a training ends with, the loss of each step, and the number of values that were trained."""

    weights: Weights
    losses: list[float]
    trained_parameters: int


def train_whole(
    forward: ForwardPass,
    start: Weights,
    lesson: Teacher,
    settings: TrainingSettings,
    state: SavedState | None = None,
    advance: Advance = quiet,
) -> Trained:
    """Train one set of weights as prefill and decode module at once: a base model, or full fine-tuning."""
    return _train(forward, TunedWeights(forward.config, start), None, lesson, settings, state, advance)


def tune_prefill(
    forward: ForwardPass,
    start: Weights,
    decode: Weights,
    lesson: Teacher,
    settings: TrainingSettings,
    *,
    scope: Scope = "all",
    rank: int = 8,
    state: SavedState | None = None,
    advance: Advance = quiet,
) -> Trained:
    """Train a prefill module, from `start`, for the frozen decode module (section 3.2.2; QSUN if that is quantised)."""
    tuned = TunedWeights(forward.config, start, scope, rank, lesson.seed)
    return _train(forward, tuned, decode, lesson, settings, state, advance)


def _train(
    forward: ForwardPass, tuned: TunedWeights, decode: Weights | None, lesson: Teacher, settings: TrainingSettings,
    state: SavedState | None, advance: Advance,
) -> Trained:  # fmt: skip
    def loss(step: int) -> torch.Tensor:
        weights = tuned.weights()
        return lesson.loss(Modules(forward, weights, weights if decode is None else decode), settings.batch_size, step)

    losses = train(tuned.trained, loss, settings, state, advance)
    return Trained(tuned.frozen(), losses, tuned.trained_parameters)
