"""Directories of trained models in Hugging Face's layout, which the live engine loads.

Beside `config.json` and `model.safetensors` they have the state to resume from (`training.safetensors`), and
`training.json`: what was trained, and the losses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from live.adaptation.training import SavedState
from live.adaptation.weights import to_named
from live.models.checkpoint import SINGLE
from live.models.config import ModelConfig, read_config
from live.models.weights import Weights, load_weights
from reports.run_directory import naming, replacing, write_text
from workloads.errors import BadInput

SCHEMA = "twin.adaptation/1"
RECORD = "training.json"
STATE = "training.safetensors"
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_PARTS = {
    "before": "input_layernorm", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
    "after": "post_attention_layernorm", "down": "mlp.down_proj",
}  # fmt: skip
"""Names of a layer's tensors that are stored as they are; `qkv` and `gate_up` are stored apart."""

_OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def saved_state(directory: Path, identity: dict[str, object]) -> SavedState:
    """The state of a training in a directory, which is made."""
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    return SavedState(directory / STATE, identity)


def write_record(directory: Path, document: dict[str, Any]) -> None:
    """Write what was trained, `training.json`."""
    write_text(directory / RECORD, json.dumps(document, indent=1) + "\n")


def write_model(directory: Path, config: ModelConfig, weights: Weights) -> None:
    write_checkpoint(directory, config_document(config), stored_tensors(config, weights))


def write_checkpoint(directory: Path, document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors; makes the directory."""
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "config.json", json.dumps(document, indent=1) + "\n")
    with replacing(directory / SINGLE) as draft:
        save_file(tensors, draft, {"format": "pt"})


def copy_text_files(model: Path, directory: Path) -> None:
    """Copy what a model's directory has of a tokenizer, a chat template and settings of generation."""
    for name in TEXT_FILES:
        if (model / name).exists():
            with naming(directory / name):
                shutil.copyfile(model / name, directory / name)


def read_model(directory: Path, device: str = "cpu") -> tuple[ModelConfig, Weights]:
    config = read_config(directory)
    return config, load_weights(directory, config, torch.float32, device)


def config_document(config: ModelConfig) -> dict[str, Any]:
    shape = config.shape
    if config.labels or shape.experts:
        raise BadInput("expected a dense language model", value=config.family)
    document: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if config.scaling is not None:
        document["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.scaling.factor,
            "low_freq_factor": config.scaling.low,
            "high_freq_factor": config.scaling.high,
            "original_max_position_embeddings": config.scaling.original,
        }
    if config.end_tokens:
        document["eos_token_id"] = list(config.end_tokens)
    return document


def stored_tensors(config: ModelConfig, weights: Weights) -> dict[str, torch.Tensor]:
    shape = config.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {}
    for name, tensor in to_named(weights).items():
        prefix, _, part = name.rpartition(".")
        if part == "qkv":
            for letter, rows in zip("qkv", tensor.split([query, key, key]), strict=True):
                tensors[f"model.{prefix}.self_attn.{letter}_proj.weight"] = rows
        elif part == "gate_up":
            for half, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                tensors[f"model.{prefix}.mlp.{half}_proj.weight"] = rows
        else:
            module = f"model.{prefix}.{_PARTS[part]}" if prefix else _OUTSIDE[part]
            tensors[f"{module}.weight"] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
