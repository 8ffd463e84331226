"""A decoder's weights by name: initial ones, the part that is trained, in few bits, and in Hugging Face's layout.

The live engine loads the directories that are written here. Beside `config.json` and `model.safetensors` they have the
state to resume from (`training.safetensors`), and `training.json`: what was trained, and the losses."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import save_file

from kernels.shapes import Shape
from kernels.w4_gemm import dequantise
from live.models.checkpoint import SINGLE
from live.models.config import Family, ModelConfig, read_config
from live.models.linear import Matrix, Rounding
from live.models.weights import DenseFFN, Layer, Weights, load_weights
from reports.run_directory import naming, replacing, write_text
from workloads.errors import BadInput

MATRICES = ("qkv", "o", "gate_up", "down")
"""Linear layers of a decoder layer; those that share their inputs are joined, as in the live engine."""

INITIAL_STD = 0.02
"""Standard deviation of initial embeddings, as in transformers (`initializer_range`)."""


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """Weights before training: matrices of variance 1 / inputs, small embeddings, norms of 1."""
    shape, generator = config.shape, torch.Generator().manual_seed(seed)

    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.randn(size, generator=generator) * std

    tensors = {"embedding": normal(shape.vocabulary, shape.hidden, std=INITIAL_STD)}
    for i in range(shape.layers):
        tensors[f"layers.{i}.before"] = torch.ones(shape.hidden)
        tensors[f"layers.{i}.after"] = torch.ones(shape.hidden)
        for name, size in shape.linear().items():
            tensors[f"layers.{i}.{name}"] = normal(*size, std=1 / math.sqrt(size[1]))
        if shape.qk_norm:
            tensors[f"layers.{i}.q_norm"] = torch.ones(shape.head_dim)
            tensors[f"layers.{i}.k_norm"] = torch.ones(shape.head_dim)
    tensors["norm"] = torch.ones(shape.hidden)
    if not config.tied:
        tensors["head"] = normal(shape.vocabulary, shape.hidden, std=INITIAL_STD)
    return from_named(tensors)


PARTS = ("before", "qkv", "q_norm", "k_norm", "o", "after", "gate_up", "down")
"""A layer's parts, in the order in which they are trained and stored; a family may have no `q_norm` and `k_norm`."""


def to_named(weights: Weights) -> dict[str, torch.Tensor]:
    """Every tensor by name; a tied head is the embedding and has no name of its own."""
    tensors = {"embedding": weights.embedding, "norm": weights.norm}
    if weights.head is not None and weights.head is not weights.embedding:
        tensors["head"] = weights.head
    for i, layer in enumerate(weights.layers):
        for name in PARTS:
            tensor = getattr(layer.ffn if name in ("gate_up", "down") else layer, name)
            if isinstance(tensor, torch.Tensor):
                tensors[f"layers.{i}.{name}"] = tensor
    return tensors


def from_named(tensors: Mapping[str, Any]) -> Weights:
    """The inverse of `to_named`; linear layers may be any that compute a product."""
    layers: list[Layer] = []
    while f"layers.{len(layers)}.qkv" in tensors:
        part: dict[str, Any] = {name: tensors.get(f"layers.{len(layers)}.{name}") for name in PARTS}
        layers.append(Layer(ffn=DenseFFN(part.pop("gate_up"), part.pop("down")), router=None, **part))
    return Weights(tensors["embedding"], layers, tensors["norm"], tensors.get("head", tensors["embedding"]))


def module_names(config: ModelConfig) -> list[str]:
    """The names of all linear layers, such as layers.0.qkv, in the order in which they are computed."""
    return [f"layers.{i}.{name}" for i in range(config.shape.layers) for name in MATRICES]


def module_sizes(weights: Weights) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear layer, by name."""
    sizes = {name: tensor.shape for name, tensor in to_named(weights).items() if module_type(name) in MATRICES}
    return {name: (outputs, inputs) for name, (outputs, inputs) in sizes.items()}


def module_type(name: str) -> str:
    """The type of a module: qkv of layers.0.qkv."""
    return name.rpartition(".")[2]


def replaced(weights: Weights, modules: Mapping[str, Matrix]) -> Weights:
    """Dense weights with other linear layers in the place of some."""
    return from_named({**to_named(weights), **modules})


@torch.no_grad()
def rounded(weights: Weights, bits: int | None) -> Weights:
    """Linear layers rounded as `kernels/w4_gemm` rounds them, then unpacked to dense tensors (QSUN, 3.3); or none."""
    if bits is None:
        return weights
    rounding, tensors = Rounding(bits), to_named(weights)
    return replaced(weights, {name: dequantise(rounding(tensor), tensor.dtype) for name, tensor in tensors.items()
                              if module_type(name) in MATRICES})  # fmt: skip


Scope: TypeAlias = Literal["all", "attention", "low_rank"]

ATTENTION = ("qkv", "o", "q_norm", "k_norm")


class TunedWeights:
    """Weights of which `trained`, by name, is a part; the rest is shared with `start`, which is never written to.

    `scope`: all tensors; attention's matrices and norms; or W + B · A for each linear layer, where W stays and A, B of
    `rank` are trained (LoRA, Hu et al. 2021, section 4.1). B begins with zeros.
    """

    def __init__(self, start: Weights, scope: Scope = "all", rank: int = 8, seed: int = 0) -> None:
        self._start = {name: tensor.detach() for name, tensor in to_named(start).items()}
        if scope == "low_rank":
            self.trained = self._low_rank(rank, seed)
        else:
            names = [name for name in self._start if scope == "all" or module_type(name) in ATTENTION]
            self.trained = {name: self._start[name].clone() for name in names}
        for tensor in self.trained.values():
            tensor.requires_grad_()

    @property
    def trained_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.trained.values())

    def weights(self) -> Weights:
        """The weights with what is trained, in autograd's graph."""
        return from_named({name: self._with_training(name, tensor) for name, tensor in self._start.items()})

    def frozen(self) -> Weights:
        """A copy of the weights as they are now, outside autograd's graph."""
        return from_named({name: tensor.detach().clone() for name, tensor in to_named(self.weights()).items()})

    def _with_training(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if f"{name}.a" in self.trained:
            return tensor + self.trained[f"{name}.b"] @ self.trained[f"{name}.a"]
        return self.trained.get(name, tensor)

    def _low_rank(self, rank: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name, matrix in self._start.items():
            if module_type(name) in MATRICES:
                outputs, inputs = matrix.shape
                pairs[f"{name}.a"] = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
                pairs[f"{name}.b"] = torch.zeros(outputs, rank)
        return pairs


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
