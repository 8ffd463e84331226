"""Sizes of small models and of their trainings: of digits (`SIZES`), and of text (`TEXT_SIZES`)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.shapes import Shape
from live.adaptation.tasks import HARD_OPERATIONS, VOCABULARY
from live.adaptation.training import TrainingSettings
from live.models.config import Family, ModelConfig

MAX_POSITIONS, MAX_TEXT_POSITIONS = 64, 1024

BYTES = 256
"""The smallest vocabulary of text: every byte is a token, and nothing is merged."""


def small_config(layers: int, hidden: int, vocabulary: int, max_positions: int, family: Family) -> ModelConfig:
    """A decoder with four query heads and two key heads in each layer, and a tied head."""
    shape = Shape(
        layers=layers,
        hidden=hidden,
        intermediate=2 * hidden,
        heads=4,
        kv_heads=2,
        head_dim=hidden // 4,
        vocabulary=vocabulary,
        qk_norm=family == "qwen3",
    )
    return ModelConfig(family=family, shape=shape, max_position_embeddings=max_positions, tied=True)


@dataclass(frozen=True)
class Size:
    """A base model with prompts of some digits, and its trainings; `hard`: for a task that no base operation helps
    with.

    `retuning`: of a tuned module, for a decode module in few bits. `prompts`: of an evaluation.
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
        return small_config(self.layers, self.hidden, VOCABULARY, MAX_POSITIONS, family)

    def fine_tuning(self, task: str) -> TrainingSettings:
        return self.hard if task in HARD_OPERATIONS else self.adaptation

    def tuning_again(self, task: str) -> TrainingSettings:
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


@dataclass(frozen=True)
class TextSize:
    """A language model of so many tokens (256: bytes), its training by windows, and windows of an evaluation."""

    layers: int
    hidden: int
    vocabulary: int
    window: int
    training: TrainingSettings
    windows: int = 128

    def config(self, family: Family = "llama") -> ModelConfig:
        return small_config(self.layers, self.hidden, self.vocabulary, MAX_TEXT_POSITIONS, family)


TEXT_SIZES = {
    "reduced": TextSize(
        layers=4,
        hidden=128,
        vocabulary=BYTES,
        window=128,
        training=TrainingSettings(steps=800, batch_size=8, learning_rate=4e-3),
    ),
    "full": TextSize(
        layers=6,
        hidden=256,
        vocabulary=2048,
        window=256,
        training=TrainingSettings(steps=2400, batch_size=16, learning_rate=2e-3),
    ),
}
"""Sizes by name: `reduced` has 0.6 million parameters and takes two minutes on an idle core, `full` has 4 million."""
