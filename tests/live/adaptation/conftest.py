"""Small models for the tests of trainings; one thread, as the trainings have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="trainings need the extra [live]")

from kernels.shapes import Shape  # noqa: E402
from live.adaptation.tasks import VOCABULARY  # noqa: E402
from live.models.config import ModelConfig  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> ModelConfig:
    """Two layers of width 32, with two query heads on each key head and a head of its own."""
    shape = Shape(2, 32, 48, 4, 2, 8, VOCABULARY, qk_norm=True)
    return ModelConfig(family="qwen3", shape=shape, max_position_embeddings=32, tied=False)
