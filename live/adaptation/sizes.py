"""Sizes of a base model, of its tasks and of its trainings."""

from __future__ import annotations

from dataclasses import dataclass

from live.adaptation.small_config import small_config
from live.adaptation.tasks import HARD_OPERATIONS, VOCABULARY
from live.adaptation.training import TrainingSettings
from live.models.config import Family, ModelConfig

MAX_POSITIONS = 64


@dataclass(frozen=True)
class Size:
    """A base model with its training, and the trainings that adapt it.

    Attributes:
        digits: of a prompt. base: the base model's training. adaptation: of each fine-tuning. hard: of one for a task
            that no base operation helps with. retuning, hard_retuning: of a module that is tuned already, for a decode
            module in few bits. prompts: of an evaluation.
    """

    layers: int
    hidden: int
    digits: int
    base: TrainingSettings
    adaptation: TrainingSettings
    hard: TrainingSettings
    retuning: TrainingSettings
    hard_retuning: TrainingSettings
    prompts: int = 1024

    def config(self, family: Family = "llama") -> ModelConfig:
        """The config of the model."""
        return small_config(self.layers, self.hidden, VOCABULARY, MAX_POSITIONS, family)

    def fine_tuning(self, task: str) -> TrainingSettings:
        """The training that adapts the base model to a task."""
        return self.hard if task in HARD_OPERATIONS else self.adaptation

    def tuning_again(self, task: str) -> TrainingSettings:
        """The training that adapts a tuned module to a decode module in few bits."""
        return self.hard_retuning if task in HARD_OPERATIONS else self.retuning


SIZES = {
    "reduced": Size(
        layers=2,
        hidden=64,
        digits=4,
        base=TrainingSettings(steps=1200, batch_size=64, learning_rate=4e-3),
        adaptation=TrainingSettings(steps=500, batch_size=32, learning_rate=3e-3),
        hard=TrainingSettings(steps=4500, batch_size=128, learning_rate=8e-3),
        retuning=TrainingSettings(steps=100, batch_size=32, learning_rate=1.5e-3),
        hard_retuning=TrainingSettings(steps=300, batch_size=64, learning_rate=4e-3),
    ),
    "full": Size(
        layers=4,
        hidden=128,
        digits=8,
        base=TrainingSettings(steps=1200, batch_size=128, learning_rate=2e-3),
        adaptation=TrainingSettings(steps=800, batch_size=64, learning_rate=1e-3),
        hard=TrainingSettings(steps=800, batch_size=64, learning_rate=1e-3),
        retuning=TrainingSettings(steps=400, batch_size=64, learning_rate=5e-4),
        hard_retuning=TrainingSettings(steps=400, batch_size=64, learning_rate=5e-4),
    ),
}
"""Sizes by name: `reduced` is a matter of minutes, `full` of hours on two cores."""
