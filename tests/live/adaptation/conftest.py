"""Small models for the tests of trainings."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="trainings need the extra [live]")

from kernels.shapes import Shape
from live.adaptation.tasks import VOCABULARY
from live.models.config import ModelConfig


@pytest.fixture
def tiny() -> ModelConfig:
    """Two layers of width 32, with two query heads on each key head and a head of its own."""
    shape = Shape(2, 32, 48, 4, 2, 8, VOCABULARY, qk_norm=True)
    return ModelConfig(family="qwen3", shape=shape, max_position_embeddings=32, tied=False)
