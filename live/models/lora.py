"""LoRA adapters of a decoder: read from PEFT directories, and computed for the rows of a step that have one.

An adapter adds (alpha / r) B A x to the output of a linear layer. Rows of a step are grouped by adapter, and each group
is computed by two narrow products beside the base model's, which computes all rows together (Punica, arXiv:2310.18547).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from latency_models.deployment.model_config import TARGET_MODULES
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.linear import Matrix, linear
from live.models.weights import DenseFFN, Layer, Weights
from workloads.errors import BadInput
from workloads.json_files import read_json_object

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers."

JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Layers of a checkpoint that each weight of a decoder joins, in the order of their outputs."""


@dataclass(frozen=True)
class AdapterPart:
    """An adapter of one layer: `down` (r, inputs), and `up` (outputs, r), scaled, for outputs from `start` on."""

    down: torch.Tensor
    up: torch.Tensor
    start: int

    def to(self, device: torch.device) -> AdapterPart:
        return AdapterPart(self.down.to(device), self.up.to(device), self.start)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: its name for clients, its rank, and its parts by layer and weight, such as "0.qkv"."""

    name: str
    rank: int
    parts: dict[str, list[AdapterPart]]

    def to(self, device: torch.device) -> Adapter:
        parts = {key: [part.to(device) for part in parts] for key, parts in self.parts.items()}
        return Adapter(self.name, self.rank, parts)

    @property
    def bytes(self) -> int:
        """Bytes of its weights."""
        return sum(
            matrix.numel() * matrix.element_size()
            for parts in self.parts.values()
            for part in parts
            for matrix in (part.down, part.up)
        )


@dataclass
class ActiveAdapters:
    """The adapters of the step that is being computed, each with its rows: a slice, or (rows,) int64 indices.

    `slots`: computes them instead, in captured steps.
    """

    groups: list[tuple[Adapter, slice | torch.Tensor]] = field(default_factory=list)
    slots: AdapterSlots | None = None


class AdapterSlots:
    """Adapters side by side at fixed addresses, so that a captured step computes any of them for any row.

    The first product, of all adapters at once, has columns for each: those that are not a row's own are set to 0. That
    is more arithmetic than groups of rows need, and the launches do not depend on the rows.
    """

    def __init__(self, adapters: Sequence[Adapter], slots: int, like: torch.Tensor) -> None:
        """`like`: a tensor of the model's type, on its device."""
        self._rank = rank = max(adapter.rank for adapter in adapters)
        sizes: dict[str, dict[int, tuple[int, int]]] = {}
        for adapter in adapters:
            for key, parts in adapter.parts.items():
                sizes.setdefault(key, {}).update({p.start: (p.down.shape[1], p.up.shape[0]) for p in parts})
        self._down = {key: like.new_zeros(len(p), slots * rank, p[min(p)][0]) for key, p in sizes.items()}
        self._up = {
            key: {start: like.new_zeros(outputs, slots * rank) for start, (_, outputs) in sorted(parts.items())}
            for key, parts in sizes.items()
        }
        self._columns = torch.arange(slots, device=like.device).repeat_interleave(rank)
        self._mask = like.new_zeros(0, slots * rank)

    def write(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot."""
        begin = slot * self._rank
        for key, ups in self._up.items():
            parts = {part.start: part for part in adapter.parts.get(key, ())}
            for down, (start, up) in zip(self._down[key], ups.items(), strict=True):
                down[begin : begin + self._rank] = 0
                up[:, begin : begin + self._rank] = 0
                if start in parts:
                    down[begin : begin + adapter.rank] = parts[start].down
                    up[:, begin : begin + adapter.rank] = parts[start].up

    def choose(self, slots: torch.Tensor) -> None:
        """Set the slot of each row, (n,) int64; -1: no adapter."""
        self._mask = (slots[:, None] == self._columns).to(self._mask.dtype)

    def add(self, key: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' outputs of one layer to y, (n, outputs)."""
        if key in self._down:
            latents = torch.matmul(x, self._down[key].transpose(1, 2)).mul_(self._mask)
            for latent, (start, up) in zip(latents, self._up[key].items(), strict=True):
                y[:, start : start + len(up)].addmm_(latent, up.T)
        return y


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer whose rows may have adapters. `key`: the name of its parts."""

    base: Matrix
    key: str
    active: ActiveAdapters

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearLayer.product`."""
        y = linear(x, self.base)
        if self.active.slots is not None:
            return self.active.slots.add(self.key, x, y)
        for adapter, rows in self.active.groups:
            for part in adapter.parts.get(self.key, ()):
                added = linear(linear(x[rows], part.down), part.up)
                y[rows, part.start : part.start + part.up.shape[0]] += added
        return y


def adapted(decoder: Decoder, active: ActiveAdapters) -> Decoder:
    """The decoder with linear layers that compute the active adapters, too. Weights are shared."""
    layers = [_adapted_layer(i, layer, active) for i, layer in enumerate(decoder.weights.layers)]
    weights = decoder.weights
    return Decoder(decoder.config, Weights(weights.embedding, layers, weights.norm, weights.head, weights.score))


def _adapted_layer(index: int, layer: Layer, active: ActiveAdapters) -> Layer:
    ffn = layer.ffn
    if isinstance(ffn, DenseFFN):
        ffn = DenseFFN(
            AdaptedLinear(ffn.gate_up, f"{index}.gate_up", active), AdaptedLinear(ffn.down, f"{index}.down", active)
        )
    qkv, o = AdaptedLinear(layer.qkv, f"{index}.qkv", active), AdaptedLinear(layer.o, f"{index}.o", active)
    return replace(layer, qkv=qkv, o=o, ffn=ffn)


def load_adapter(name: str, directory: Path, config: ModelConfig, dtype: torch.dtype) -> Adapter:
    """The adapter in a PEFT directory, on the CPU.

    `BadInput` for other layers or kinds that are not served: biases, DoRA, ranks or alphas by pattern, whole modules,
    embeddings, experts.
    """
    path = directory / CONFIG_FILE
    settings = read_json_object(path)
    rank, scale = _rank_and_scale(settings, path)
    _check_kind(settings, path)
    try:
        opened = safe_open(directory / WEIGHTS_FILE, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"expected a safetensors file ({error})", file=directory / WEIGHTS_FILE) from None
    with opened as file:
        tensors = {key: file.get_tensor(key) for key in file.offset_keys()}
    parts: dict[str, list[AdapterPart]] = {}
    for layer in range(config.shape.layers):
        for key, modules in JOINED.items():
            start = 0
            for module, outputs in zip(modules, _outputs(config, key), strict=True):
                inputs = config.shape.linear()[key][1]
                part = _take_part(tensors, f"{PREFIX}{layer}.{module}.lora_", (rank, inputs, outputs), directory)
                if part is not None:
                    up = (part[1].to(torch.float64) * scale).to(dtype)
                    parts.setdefault(f"{layer}.{key}", []).append(AdapterPart(part[0].to(dtype), up, start))
                start += outputs
    if tensors:
        expected = f"expected adapters of {', '.join(TARGET_MODULES)} in the model's {config.shape.layers} layers"
        raise BadInput(expected, field=min(tensors), file=directory)
    if config.shape.experts and any(key.endswith(("gate_up", "down")) for key in parts):
        raise BadInput("expected adapters of attention alone, since the model has experts", file=directory)
    return Adapter(name, rank, parts)


def _take_part(
    tensors: dict[str, torch.Tensor], name: str, sizes: tuple[int, int, int], directory: Path
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Take A and B of one layer out of `tensors`; None if it has no adapter. `sizes`: rank, inputs and outputs."""
    rank, inputs, outputs = sizes
    shapes = {f"{name}A.weight": (rank, inputs), f"{name}B.weight": (outputs, rank)}
    tensor_names = [tensor_name for tensor_name in shapes if tensor_name in tensors]
    if not tensor_names:
        return None
    for tensor_name, shape in shapes.items():
        if tensor_name not in tensors:
            raise BadInput("expected both lora_A and lora_B", field=tensor_name, file=directory)
        if tuple(tensors[tensor_name].shape) != shape:
            expected = f"expected shape {list(shape)}, as the model and the rank say"
            raise BadInput(expected, field=tensor_name, value=list(tensors[tensor_name].shape), file=directory)
    a, b = (tensors.pop(tensor_name) for tensor_name in shapes)
    return a, b


def load_adapters(modules: Iterable[str], config: ModelConfig, dtype: torch.dtype) -> list[Adapter]:
    """The adapters of `--lora-modules`, each NAME=PATH; `BadInput` for a name that comes twice, or a bad adapter."""
    adapters: dict[str, Adapter] = {}
    for module in modules:
        name, equals, path = module.partition("=")
        if not (name and equals and path):
            raise BadInput("expected NAME=PATH", field="--lora-modules", value=module)
        if name in adapters:
            raise BadInput("expected each name once", field="--lora-modules", value=name)
        adapters[name] = load_adapter(name, Path(path), config, dtype)
    return list(adapters.values())


def _outputs(config: ModelConfig, key: str) -> list[int]:
    shape = config.shape
    if key == "qkv":
        keys = shape.kv_heads * shape.head_dim
        return [shape.heads * shape.head_dim, keys, keys]
    return [shape.intermediate] * 2 if key == "gate_up" else [shape.hidden]


def _rank_and_scale(settings: dict[str, Any], path: Path) -> tuple[int, float]:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise BadInput("expected a whole number from 1 up", field="r", value=rank, file=path)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise BadInput("expected a number", field="lora_alpha", value=alpha, file=path)
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _check_kind(settings: dict[str, Any], path: Path) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA", None), "bias": ("none", None), "use_dora": (False, None),
        "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": ([], None),
        "fan_in_fan_out": (False, None),
    }  # fmt: skip
    for name, values in allowed.items():
        if (value := settings.get(name)) not in values:
            raise BadInput(f"expected {values[0]!r}, the kind that is served", field=name, value=value, file=path)
