"""A validation's files for tests: a tiny model, and the scenario beside it."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60,
}  # fmt: skip


def write_validation(folder: Path, scenario: str, max_positions: int = 128) -> Path:
    """Write config.json and the scenario, which names it; returns the scenario's file."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": max_positions}))
    file = folder / "scenario.yaml"
    file.write_text(scenario)
    return file
