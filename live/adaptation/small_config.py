"""The configs of the small models that are trained here."""

from __future__ import annotations

from kernels.shapes import Shape
from live.models.config import Family, ModelConfig


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
