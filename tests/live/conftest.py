"""Tiny random checkpoints in Hugging Face's format, written by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live plant needs the extra [live]")

COMMON = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """By name of `MODELS`: the directory, and transformers' own model in float32."""
    transformers = pytest.importorskip("transformers", reason="checkpoints are written by transformers")
    checkpoints: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in checkpoints:
            family, settings = MODELS[name]
            torch.manual_seed(7)
            config = getattr(transformers, f"{family}Config")(**COMMON, **settings)
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            for parameter in model.parameters():
                parameter.data = torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.2)
                if parameter.dim() == 1:
                    parameter.data += 1
            directory = tmp_path_factory.mktemp(name)
            model.save_pretrained(directory, max_shard_size="40KB" if name == "llama" else "5GB")
            checkpoints[name] = (directory, model)
        return checkpoints[name]

    return make


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer of 320 ids, a chat template and an end token, as `making` describes."""
    pytest.importorskip("tokenizers", reason="text needs the extra [live]")
    from tests.live.text.making import write_byte_level

    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(directory)
    return directory


@pytest.fixture(scope="session")
def models(checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Any, Any]:
    """A decoder of Qwen3's family in float32, and transformers' own model."""
    from live.models.config import read_config
    from live.models.decoder import Decoder
    from live.models.weights import load_weights

    directory, peer = checkpoint("qwen3")
    config = read_config(directory)
    return Decoder(config, load_weights(directory, config, torch.float32, "cpu")), peer
