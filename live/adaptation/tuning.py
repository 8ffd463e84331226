"""The trained part of a model's weights: all of them, attention's, or a term of low rank."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch

from live.adaptation.weights import MATRICES, from_named, to_named
from live.models.config import ModelConfig
from live.models.weights import Weights

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
