"""A decoder's weights by name: initial ones, the part that is trained, and weights in few bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from kernels.w4_gemm import dequantise
from live.models.config import ModelConfig
from live.models.linear import Matrix, Rounding
from live.models.weights import DenseFFN, Layer, Weights

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
    return from_named(config, tensors)


def to_named(weights: Weights) -> dict[str, torch.Tensor]:
    """Every tensor by name; a tied head is the embedding and has no name of its own."""
    tensors = {"embedding": weights.embedding, "norm": weights.norm}
    if weights.head is not None and weights.head is not weights.embedding:
        tensors["head"] = weights.head
    for i, layer in enumerate(weights.layers):
        assert isinstance(layer.ffn, DenseFFN)
        parts = {
            "before": layer.before, "qkv": layer.qkv, "q_norm": layer.q_norm, "k_norm": layer.k_norm, "o": layer.o,
            "after": layer.after, "gate_up": layer.ffn.gate_up, "down": layer.ffn.down,
        }  # fmt: skip
        for name, tensor in parts.items():
            if isinstance(tensor, torch.Tensor):
                tensors[f"layers.{i}.{name}"] = tensor
    return tensors


def from_named(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """The inverse of `to_named`."""
    layers = []
    for i in range(config.shape.layers):
        prefix = f"layers.{i}."
        part = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        layers.append(
            Layer(
                before=part["before"], qkv=part["qkv"], q_norm=part.get("q_norm"), k_norm=part.get("k_norm"),
                o=part["o"], after=part["after"], router=None, ffn=DenseFFN(part["gate_up"], part["down"]),
            )
        )  # fmt: skip
    head = tensors["embedding"] if config.tied else tensors["head"]
    return Weights(tensors["embedding"], layers, tensors["norm"], head)


def module_names(config: ModelConfig) -> list[str]:
    """The names of all linear layers, such as layers.0.qkv, in the order in which they are computed."""
    return [f"layers.{i}.{name}" for i in range(config.shape.layers) for name in MATRICES]


def module_sizes(config: ModelConfig, weights: Weights) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear layer, by name."""
    tensors = to_named(weights)
    return {name: (tensors[name].shape[0], tensors[name].shape[1]) for name in module_names(config)}


def module_type(name: str) -> str:
    """The type of a module: qkv of layers.0.qkv."""
    return name.rpartition(".")[2]


def replaced(weights: Weights, modules: Mapping[str, Matrix]) -> Weights:
    """The weights with other linear layers in the place of some; `weights` keep theirs."""
    layers = []
    for i, layer in enumerate(weights.layers):
        assert isinstance(layer.ffn, DenseFFN)
        qkv, o, gate_up, down = (
            modules.get(f"layers.{i}.{name}", old)
            for name, old in zip(MATRICES, (layer.qkv, layer.o, layer.ffn.gate_up, layer.ffn.down), strict=True)
        )
        layers.append(replace(layer, qkv=qkv, o=o, ffn=DenseFFN(gate_up, down)))
    return replace(weights, layers=layers)


def rounded(config: ModelConfig, weights: Weights, rounding: Rounding) -> Weights:
    """Linear layers rounded as `kernels/w4_gemm` rounds them, then unpacked to dense tensors (QSUN, 3.3)."""
    tensors = to_named(weights)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.rpartition(".")[2] in MATRICES:
                tensors[name] = dequantise(rounding(tensor), tensor.dtype)
    return from_named(config, tensors)


Scope: TypeAlias = Literal["all", "attention", "low_rank"]

ATTENTION = ("qkv", "o", "q_norm", "k_norm")


class TunedWeights:
    """Weights of which `trained`, by name, is a part; the rest is shared with `start`, which is never written to.

    `scope`: all tensors; attention's matrices and norms; or W + B · A for each linear layer, where W stays and A, B of
    `rank` are trained (LoRA, Hu et al. 2021, section 4.1). B begins with zeros.
    """

    def __init__(self, config: ModelConfig, start: Weights, scope: Scope = "all", rank: int = 8, seed: int = 0) -> None:
        self._config = config
        self._start = {name: tensor.detach() for name, tensor in to_named(start).items()}
        if scope == "low_rank":
            self.trained = self._low_rank(rank, seed)
        else:
            names = [name for name in self._start if scope == "all" or name.rpartition(".")[2] in ATTENTION]
            self.trained = {name: self._start[name].clone() for name in names}
        for tensor in self.trained.values():
            tensor.requires_grad_()

    @property
    def trained_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.trained.values())

    def weights(self) -> Weights:
        """The weights with what is trained, in autograd's graph."""
        tensors = {name: self._with_training(name, tensor) for name, tensor in self._start.items()}
        return from_named(self._config, tensors)

    def frozen(self) -> Weights:
        """A copy of the weights as they are now, outside autograd's graph."""
        tensors = {name: tensor.detach().clone() for name, tensor in to_named(self.weights()).items()}
        return from_named(self._config, tensors)

    def _with_training(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if f"{name}.a" in self.trained:
            return tensor + self.trained[f"{name}.b"] @ self.trained[f"{name}.a"]
        return self.trained.get(name, tensor)

    def _low_rank(self, rank: int, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name, matrix in self._start.items():
            if name.rpartition(".")[2] in MATRICES:
                outputs, inputs = matrix.shape
                pairs[f"{name}.a"] = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
                pairs[f"{name}.b"] = torch.zeros(outputs, rank)
        return pairs
