"""A decoder's weights. Matrices with the same inputs are joined, so that one product replaces several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch

from kernels.error_compensator import Compensator
from kernels.w4_gemm import PackedWeight
from live.models.checkpoint import Checkpoint
from live.models.config import ModelConfig
from live.models.linear import Group, Matrix, Rounding, compensated, read_compensators
from live.models.packed import is_packed, read_joined
from workloads.errors import BadInput


@dataclass(frozen=True)
class Experts:
    """A mixture's gate_up (experts, 2 · intermediate, hidden) and down (experts, hidden, intermediate), by ranks."""

    gate_up: torch.Tensor
    down: torch.Tensor
    group: Group | None = None


@dataclass(frozen=True)
class DenseFFN:
    """The weights of a dense FFN: `gate_up` (2 · intermediate, hidden), `down` (hidden, intermediate)."""

    gate_up: Matrix
    down: Matrix


FFN: TypeAlias = DenseFFN | Experts
"""The weights of the FFN stage of a layer."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its attention stage, and its FFN unless another process computes it.

    `qkv`: ((heads + 2 · kv_heads) · head_dim, hidden). `o`: (hidden, heads · head_dim). `q_norm`, `k_norm`:
    (head_dim,). `before`, `after`: norms of attention and FFN, (hidden,). `router`: (experts, hidden), part of the
    attention stage.
    """

    before: torch.Tensor
    qkv: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    after: torch.Tensor
    router: torch.Tensor | None
    ffn: FFN | None


@dataclass(frozen=True)
class Weights:
    """A whole decoder: embedding and head (vocabulary, hidden), the same if tied; score (labels, hidden) of a
    classifier.
    """

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor | None
    score: torch.Tensor | None = None


Keep: TypeAlias = Callable[[Layer], Layer]
"""Returns what a process keeps of a layer that has been read; the next layer is read after it."""


def whole(layer: Layer) -> Layer:
    """The layer, of which all is kept."""
    return layer


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    rounding: Rounding | None = None,
    *,
    with_ffn: bool = True,
    with_head: bool = True,
    keep: Keep = whole,
) -> Weights:
    """The weights in a Hugging Face directory, converted to a type and moved to a device.

    Packed linear layers stay packed, with the directory's error compensators. Others are rounded if `rounding` is
    given, except for embedding, head, norms and experts. Raises `BadInput` for tensors that are missing or of another
    shape, experts in few bits, or rounding of a quantised checkpoint.
    """
    shape = config.shape
    _check_rounding(config, rounding, directory)
    with Checkpoint(directory) as checkpoint:
        reader = _Reader(checkpoint, config, dtype, device, rounding, read_compensators(directory, shape, device))
        table = (shape.vocabulary, shape.hidden)
        embedding = reader.joined(["model.embed_tokens.weight"], [table])
        labels = len(config.labels)
        head: torch.Tensor | None
        score: torch.Tensor | None
        if not with_head:
            head, score = None, None
        elif labels:
            head, score = None, reader.joined(["score.weight"], [(labels, shape.hidden)])
        else:
            tied = _tied(checkpoint, embedding) if config.tied else reader.joined(["lm_head.weight"], [table])
            head, score = tied, None
        return Weights(
            embedding=embedding,
            layers=[keep(reader.layer(i, with_ffn)) for i in range(shape.layers)],
            norm=reader.vector("model.norm.weight", shape.hidden),
            head=head,
            score=score,
        )


def load_ffns(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: str, rounding: Rounding | None = None
) -> list[FFN]:
    """The FFNs of all layers, for a process that computes nothing else. Arguments and errors as of `load_weights`."""
    _check_rounding(config, rounding, directory)
    with Checkpoint(directory) as checkpoint:
        compensators = read_compensators(directory, config.shape, device)
        reader = _Reader(checkpoint, config, dtype, device, rounding, compensators)
        return [reader.ffn(i) for i in range(config.shape.layers)]


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of layers from a checkpoint. `compensators`: by layer and type, such as 0.qkv."""

    checkpoint: Checkpoint
    config: ModelConfig
    dtype: torch.dtype
    device: str
    rounding: Rounding | None
    compensators: Mapping[str, Compensator]

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.checkpoint.tensor(name, (size,)).to(self.device, self.dtype)

    def joined(self, names: list[str], shapes: list[tuple[int, ...]]) -> torch.Tensor:
        for name in names:
            if is_packed(self.checkpoint, module := name.removesuffix(".weight")):
                raise BadInput("expected this one dense", field=f"{module}.qweight", file=self.checkpoint.directory)
        return self.checkpoint.joined(names, shapes).to(self.device, self.dtype)

    def matrix(self, key: str, names: list[str], shapes: list[tuple[int, ...]]) -> Matrix:
        return compensated(self._plain(names, shapes), self.compensators.get(key), key, self.checkpoint.directory)

    def _plain(self, names: list[str], shapes: list[tuple[int, ...]]) -> Matrix:
        if self.config.quantisation is not None:
            modules = [name.removesuffix(".weight") for name in names]
            return read_joined(self.checkpoint, modules, shapes, self.config.quantisation, self.dtype, self.device)
        if self.rounding is None:
            return self.joined(names, shapes)
        return self.rounding(self.checkpoint.joined(names, shapes).to(self.device))

    def layer(self, index: int, with_ffn: bool) -> Layer:
        shape, name = self.config.shape, f"model.layers.{index}"
        query, key = (shape.heads * shape.head_dim, shape.hidden), (shape.kv_heads * shape.head_dim, shape.hidden)
        attention = f"{name}.self_attn"
        router = self.joined([f"{name}.mlp.gate.weight"], [(shape.experts, shape.hidden)]) if shape.experts else None
        return Layer(
            before=self.vector(f"{name}.input_layernorm.weight", shape.hidden),
            qkv=self.matrix(f"{index}.qkv", [f"{attention}.{part}_proj.weight" for part in "qkv"], [query, key, key]),
            q_norm=self.vector(f"{attention}.q_norm.weight", shape.head_dim) if shape.qk_norm else None,
            k_norm=self.vector(f"{attention}.k_norm.weight", shape.head_dim) if shape.qk_norm else None,
            o=self.matrix(f"{index}.o", [f"{attention}.o_proj.weight"], [query[::-1]]),
            after=self.vector(f"{name}.post_attention_layernorm.weight", shape.hidden),
            router=router,
            ffn=self.ffn(index) if with_ffn else None,
        )

    def ffn(self, index: int) -> FFN:
        shape, name = self.config.shape, f"model.layers.{index}.mlp"
        if not shape.experts:
            up, down = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
            return DenseFFN(
                gate_up=self.matrix(
                    f"{index}.gate_up", [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"], [up, up]
                ),
                down=self.matrix(f"{index}.down", [f"{name}.down_proj.weight"], [down]),
            )
        up, down = (shape.expert_intermediate, shape.hidden), (shape.hidden, shape.expert_intermediate)
        experts = [f"{name}.experts.{i}" for i in range(shape.experts)]
        joined = self.joined
        return Experts(
            gate_up=torch.stack([joined([f"{e}.gate_proj.weight", f"{e}.up_proj.weight"], [up, up]) for e in experts]),
            down=torch.stack([joined([f"{e}.down_proj.weight"], [down]) for e in experts]),
        )


def _tied(checkpoint: Checkpoint, embedding: torch.Tensor) -> torch.Tensor:
    """The embedding as the head. The checkpoint may also contain the head, if it is equal."""
    name = "lm_head.weight"
    if name in checkpoint and not torch.equal(checkpoint.tensor(name).to(embedding), embedding):
        expected = "expected the embedding or nothing, since tie_word_embeddings is true"
        raise BadInput(expected, field=name, file=checkpoint.directory)
    return embedding


def model_bytes(config: ModelConfig, dtype: torch.dtype, rounding: Rounding | None = None) -> int:
    """A lower bound of the bytes that weights take; packed layers without scales and zero points."""
    shape, kind = config.shape, rounding or config.quantisation
    sizes = shape.linear()
    if shape.experts:
        del sizes["gate_up"], sizes["down"]
    linear = shape.layers * sum(outputs * inputs for outputs, inputs in sizes.values())
    experts = shape.layers * shape.experts * shape.hidden * (3 * shape.expert_intermediate + 1)
    tables = shape.vocabulary * shape.hidden * (1 if config.tied or config.labels else 2)
    bits = kind.bits if kind is not None else 8 * dtype.itemsize
    rotary = 2 * 4 * config.max_position_embeddings * shape.head_dim // 2
    return linear * bits // 8 + (experts + tables) * dtype.itemsize + rotary


def _check_rounding(config: ModelConfig, rounding: Rounding | None, directory: Path) -> None:
    _can_round(config, rounding)
    if rounding is not None and config.quantisation is not None:
        expected = f"expected none: the checkpoint is {config.quantisation.method}'s already"
        raise BadInput(expected, field="quantise", file=directory)


def _can_round(config: ModelConfig, rounding: Rounding | None) -> None:
    if rounding is not None and config.shape.experts:
        raise BadInput("expected dense weights: no experts are served in few bits", field="quantise", value=rounding)


def random_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    rounding: Rounding | None = None,
    keep: Keep = whole,
) -> Weights:
    """Random weights of the right shapes: matrices as initialised before training, norms near 1.

    Rounded as `rounding` or the config says; `BadInput` for experts in few bits, or groups that cannot be.
    """
    kind = config.quantisation
    if rounding is None and kind is not None:
        rounding = Rounding(kind.bits, kind.group, kind.symmetric)
    _can_round(config, rounding)
    shape, generator = config.shape, torch.Generator(device).manual_seed(seed)

    def matrix(*size: int) -> torch.Tensor:
        scale = 1 / math.sqrt(size[-1])
        return (torch.randn(size, generator=generator, device=device) * scale).to(dtype)

    def linear(*size: int) -> Matrix:
        return matrix(*size) if rounding is None else rounding(matrix(*size))

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator, device=device)).to(dtype)

    def layer() -> Layer:
        sizes = shape.linear()
        inner = shape.expert_intermediate
        return Layer(
            before=norm(shape.hidden),
            qkv=linear(*sizes["qkv"]),
            q_norm=norm(shape.head_dim) if shape.qk_norm else None,
            k_norm=norm(shape.head_dim) if shape.qk_norm else None,
            o=linear(*sizes["o"]),
            after=norm(shape.hidden),
            router=matrix(shape.experts, shape.hidden) if shape.experts else None,
            ffn=Experts(matrix(shape.experts, 2 * inner, shape.hidden), matrix(shape.experts, shape.hidden, inner))
            if shape.experts
            else DenseFFN(linear(*sizes["gate_up"]), linear(*sizes["down"])),
        )

    embedding = torch.randn(shape.vocabulary, shape.hidden, generator=generator, device=device).to(dtype)
    layers = [keep(layer()) for _ in range(shape.layers)]
    last = norm(shape.hidden)
    if config.labels:
        return Weights(embedding, layers, last, None, matrix(len(config.labels), shape.hidden))
    return Weights(embedding, layers, last, embedding if config.tied else matrix(shape.vocabulary, shape.hidden))


def without_ffns(weights: Weights) -> Weights:
    """The weights of a process that computes attention only."""
    return replace(weights, layers=[replace(layer, ffn=None) for layer in weights.layers])


def ffns_of(weights: Weights) -> list[FFN]:
    """The FFNs of all layers, for a process that computes nothing else."""
    return [layer.ffn for layer in weights.layers if layer.ffn is not None]


Part = TypeVar("Part")


def with_new_counters(part: Part) -> Part:
    """The same weights in the same memory, but for new counters (`arrivals`) of packed weights and compensators.

    A kernel counts its programs in them, so one set serves one launch at a time. Workers on CUDA streams of their own,
    which share weights, need a set each, or add up parts that are not written yet, or wait for ever.
    """
    if isinstance(part, list | tuple):
        return type(part)(with_new_counters(item) for item in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    names = [field.name for field in fields(part)]
    changes = {name: with_new_counters(getattr(part, name)) for name in names}
    if isinstance(part, PackedWeight | Compensator):
        changes["arrivals"] = torch.zeros_like(part.arrivals)
    return replace(part, **changes)
