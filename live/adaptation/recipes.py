"""The trainings: a base model, full fine-tuning, and prefill-only tuning against a frozen decode module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from live.adaptation.decomposition import Modules
from live.adaptation.forward import ForwardPass
from live.adaptation.tasks import draw
from live.adaptation.training import SavedState, TrainingSettings, train
from live.adaptation.tuning import Scope, TunedWeights
from live.models.weights import Weights

Advance = Callable[[str], None]


def quiet(text: str) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Lesson:
    """The data of a training: prompts of operations with their answers, drawn from a seed.

    Attributes:
        operations: one is chosen at random for each prompt. digits: of a prompt.
    """

    operations: tuple[str, ...]
    digits: int
    seed: int

    def batch(self, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts and answers of a training step."""
        return draw(self.operations, self.digits, size, self.seed, step)

    def exact_match(self, modules: Modules, prompts: int) -> float:
        """The share of right answers to prompts that no training draws."""
        return modules.exact_match(*draw(self.operations, self.digits, prompts, self.seed, 0, "evaluation"))


@dataclass(frozen=True)
class Trained:
    """The weights that a training ends with, the loss of each step, and the number of values that were trained."""

    weights: Weights
    losses: list[float]
    trained_parameters: int


def train_whole(
    forward: ForwardPass,
    start: Weights,
    lesson: Lesson,
    settings: TrainingSettings,
    state: SavedState | None = None,
    advance: Advance = quiet,
) -> Trained:
    """Train one set of weights as prefill and decode module at once: a base model, or full fine-tuning."""
    tuned = TunedWeights(forward.config, start)

    def loss(step: int) -> torch.Tensor:
        weights = tuned.weights()
        return Modules(forward, weights, weights).loss(*lesson.batch(settings.batch_size, step))

    losses = train(tuned.trained, loss, settings, state, advance)
    return Trained(tuned.frozen(), losses, tuned.trained_parameters)


def tune_prefill(
    forward: ForwardPass,
    start: Weights,
    decode: Weights,
    lesson: Lesson,
    settings: TrainingSettings,
    *,
    scope: Scope = "all",
    rank: int = 8,
    state: SavedState | None = None,
    advance: Advance = quiet,
) -> Trained:
    """Train a prefill module, from `start`, for the frozen decode module (section 3.2.2; QSUN if that is quantised)."""
    tuned = TunedWeights(forward.config, start, scope, rank, lesson.seed)

    def loss(step: int) -> torch.Tensor:
        return Modules(forward, tuned.weights(), decode).loss(*lesson.batch(settings.batch_size, step))

    losses = train(tuned.trained, loss, settings, state, advance)
    return Trained(tuned.frozen(), losses, tuned.trained_parameters)
