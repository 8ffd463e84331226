"""Sizes of language models and of their trainings."""

from __future__ import annotations

from dataclasses import dataclass

from live.adaptation.small_config import small_config
from live.adaptation.text.tokenizer import BYTES
from live.adaptation.training import TrainingSettings
from live.models.config import Family, ModelConfig

MAX_POSITIONS = 1024


@dataclass(frozen=True)
class TextSize:
    """A language model with its training.

    Attributes:
        vocabulary: tokens; 256 for bytes. window: tokens of a training sequence. training: of the model.
        windows: held-out windows of an evaluation.
    """

    layers: int
    hidden: int
    vocabulary: int
    window: int
    training: TrainingSettings
    windows: int = 128

    def config(self, family: Family = "llama") -> ModelConfig:
        """The config of the model."""
        return small_config(self.layers, self.hidden, self.vocabulary, MAX_POSITIONS, family)


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
