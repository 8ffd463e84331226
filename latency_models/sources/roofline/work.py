"""The kernels of one forward pass on one device: the parts of a step, their kinds, FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from latency_models.deployment.hardware import Hardware, Precision
from latency_models.deployment.layers import ExpertLoad
from latency_models.deployment.models import (
    ROUTER,
    DenseFFN,
    ExpertFFN,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    Model,
)
from latency_models.sources.roofline.efficiency import Efficiency, Kind, all_reduce_kind
from latency_models.sources.roofline.placement import Placement, Weights
from workloads.errors import BadInput

ABOUT = {
    "linear_kernels": "linear layers",
    "experts_kernels": "experts",
    "prompt_attention_kernels": "attention of prompts",
    "decode_attention_kernels": "attention of decodes",
    "prompt_index_kernels": "indexers of prompts",
    "decode_index_kernels": "indexers of decodes",
    "prompt_state_kernels": "linear attention of prompts",
    "decode_state_kernels": "linear attention of decodes",
    "elementwise_kernels": "elementwise kernels",
    "all_reduce_kernels": "all-reduces",
}
"""Parts of a step whose errors are independent of each other, in words."""

WHOLE_STEP = "whole_step"
"""The name of the error of all parts together."""

_FITTED_AS: dict[Weights, Weights] = {"int8": "fp8"}
"""Formats that were not measured, and those whose kernels stand for them: the peaks of INT8 and FP8 are the same."""


STATES_FITTED_AS = {"gdn": "gdn", "kda": "kda", "mamba2": "gdn"}
"""Linear attention, and that whose kernels stand for it: no table has the recurrence of Mamba-2."""

MORE_PRECISE: dict[Kind, tuple[tuple[Kind, Precision], ...]] = {
    "linear_fp8": (("linear_bf16", "bf16"),),
    "linear_fp4": (("linear_fp8", "fp8"), ("linear_bf16", "bf16")),
    "experts_fp8": (("experts_bf16", "bf16"),),
    "experts_fp4": (("experts_fp8", "fp8"), ("experts_bf16", "bf16")),
    "experts_mxfp4": (("experts_bf16", "bf16"),),
    "prompt_attention_fp8": (("prompt_attention_bf16", "bf16"),),
}
"""Kinds whose kernels an engine can use after unpacking the weights, and what these compute in. The fastest is taken,
so that a less precise format is never slower."""


def linear_kind(weights: Weights) -> Kind:
    """The kind of linear layers with weights of a format."""
    return cast("Kind", f"linear_{_FITTED_AS.get(weights, weights)}")


def kinds_of_parts(model: Model, hardware: Hardware, placement: Placement) -> dict[str, Kind]:
    """The kind of kernel of each part of a step; parts that this placement lacks are left out."""
    latent = isinstance(model.attention, LatentAttention)
    kinds: dict[str, Kind] = {
        "linear_kernels": linear_kind(placement.weights),
        "prompt_attention_kernels": "prompt_latent" if latent else cast("Kind", f"prompt_attention_{placement.cache}"),
        "decode_attention_kernels": "decode_latent" if latent else cast("Kind", f"decode_attention_{placement.cache}"),
        "elementwise_kernels": "elementwise",
    }
    if model.indexer is not None:
        kinds |= {"prompt_index_kernels": "prompt_index", "decode_index_kernels": "decode_index"}
    if model.linear_attention is not None:
        for part in ("prompt", "decode"):
            kinds[f"{part}_state_kernels"] = cast("Kind", f"{part}_{STATES_FITTED_AS[model.linear_attention.kind]}")
    if isinstance(model.ffn, ExpertFFN):
        kinds["experts_kernels"] = cast("Kind", f"experts_{_FITTED_AS.get(placement.experts, placement.experts)}")
    if placement.devices > 1:
        kinds["all_reduce_kernels"] = all_reduce_kind(hardware)
    return kinds


def notes_on(model: Model, hardware: Hardware, placement: Placement, efficiency: Efficiency) -> list[str]:
    """Notes on the parts of a step that are extrapolated."""
    kinds, name = kinds_of_parts(model, hardware, placement), hardware.name
    foreign = [ABOUT[part] for part, kind in kinds.items() if name not in efficiency.kernels[kind].devices]
    notes = ["computed from data sheets and fitted efficiencies, not measured (source roofline)"]
    if foreign:
        notes.append(f"kernels of {name} were not measured, others' efficiencies are used: {', '.join(foreign)}")
    if "int8" in (placement.weights, placement.experts):
        notes.append("INT8 kernels are taken to reach the shares of their peak that FP8 kernels reach")
    linear = model.linear_attention
    if linear is not None and (measured := STATES_FITTED_AS[linear.kind]) != linear.kind:
        notes.append(f"kernels of {linear.kind} were not measured, {measured}'s efficiencies are used")
    return notes


ACTIVATION_BYTES = 2.0
"""Bytes of an activation element."""

DISPATCHED_BYTES: dict[Precision, float] = {"bf16": 4.0, "fp8": 3.0, "int8": 3.0, "fp4": 3.0}
"""Bytes of an element that goes to an expert and comes back, by what experts compute in: there in FP8 if they compute
in no more, back in bf16."""

EXCHANGES: tuple[Kind, ...] = ("all_to_all", "all_to_all_ll")
EXCHANGES_OVER_NODES: tuple[Kind, ...] = ("all_to_all_nodes", "all_to_all_nodes_ll")
"""All-to-alls of rows with their experts, for high throughput and for low latency."""

SMALL_KERNELS = 4
"""Elementwise kernels of a layer: two norms, rotary positions, and the activation of the FFN."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer: `times` in a forward pass, `columns` outputs of `inner` inputs, on one device."""

    times: int
    columns: float
    inner: float
    weights: Weights


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The use of experts on the fullest device: its rows over the mean, each expert's share, and EPLB's slowdown."""

    fullest: float = 1.0
    shares: tuple[float, ...] | None = None
    slowdown: float = 1.0


EVEN = ExpertRows()


def expert_rows(model: Model, placement: Placement, load: ExpertLoad | None, base: Path = Path()) -> ExpertRows:
    """The rows of the fullest device, even if experts are split; `BadInput` for a load without experts."""
    ffn = model.ffn
    if load is None:
        return EVEN
    if not isinstance(ffn, ExpertFFN):
        expected = f"expected none, since {model.name} has no experts"
        raise BadInput(expected, field="step_time.expert_load", value=load.popularity)
    fullest = load.fullest(ffn.experts, placement.stage_devices, base) if placement.expert_parallel else 1.0
    return ExpertRows(fullest, tuple(load.shares(ffn.experts, base).tolist()), load.slowdown)


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one layer on one device: `resident` of `total`; of `columns` × `hidden` weights."""

    times: int
    resident: float
    total: int
    chosen: int
    columns: float
    hidden: int
    weights: Weights
    use: ExpertRows = EVEN

    def touched(self, tokens: float) -> float:
        """Mean number of resident experts that a batch of tokens chooses, by their popularity."""
        if self.use.shares is None:
            missed: float = (1.0 - self.chosen / self.total) ** tokens
        else:
            missed = sum((1.0 - min(self.chosen * share, 1.0)) ** tokens for share in self.use.shares) / self.total
        return self.resident * (1.0 - missed)

    def rows(self, tokens: float) -> float:
        """Rows of the fullest device: a row is a token at one of its experts."""
        return tokens * self.chosen * self.resident / self.total * self.use.fullest


def sent_copies(places: float, chosen: float, *, each_expert: bool) -> float:
    """Copies of a row that go to other places (devices, or nodes), among which the experts are spread evenly.

    One goes to each place that has one of the `chosen` experts; with `each_expert`, one to each expert.
    """
    if each_expert:
        return chosen * (1.0 - 1.0 / places)
    return (places - 1.0) * float(1.0 - (1.0 - 1.0 / places) ** chosen)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer on one device: FLOPs of a query for each token that it attends to.

    `cached`: elements of a token in the KV cache; `query`: of a query and its output; `latent`: cached compressed.
    """

    prompt_flops: float
    decode_flops: float
    cached: float
    query: float
    latent: bool


def matrices(model: Model, placement: Placement) -> Iterator[Matrix]:
    """The linear layers that all rows of a batch go through. The head, for sequences that sample, is not among them."""
    for times, (name, columns, inner) in model.projections(placement.tensor_parallel):
        yield Matrix(times, columns, inner, "bf16" if name == ROUTER else placement.weights)


def head(model: Model, placement: Placement) -> Matrix:
    return Matrix(1, model.vocabulary / placement.tensor_parallel, model.hidden_size, "bf16")


def routed_experts(model: Model, placement: Placement, use: ExpertRows = EVEN) -> Experts | None:
    """The routed experts; None for a dense model."""
    ffn, devices = model.ffn, placement.stage_devices
    if not isinstance(ffn, ExpertFFN):
        return None
    spread_whole = placement.expert_parallel
    return Experts(
        times=model.expert_layers,
        resident=ffn.experts / devices if spread_whole else ffn.experts,
        total=ffn.experts,
        chosen=ffn.experts_per_token,
        columns=ffn.matrices * ffn.intermediate_size / (1 if spread_whole else devices),
        hidden=ffn.expert_width(model.hidden_size),
        weights=placement.experts,
        use=use,
    )


def attention_shape(model: Model, placement: Placement) -> AttentionShape:
    """The attention of one layer. Decodes of latent attention work on the compressed cache itself."""
    attention, width = model.attention, placement.tensor_parallel
    heads = attention.heads / width
    if isinstance(attention, GroupedQueryAttention):
        flops, kv_heads = 4 * heads * attention.head_dim, max(attention.kv_heads / width, 1.0)
        return AttentionShape(
            flops, flops, 2 * kv_heads * attention.head_dim, 2 * heads * attention.head_dim, latent=False
        )
    key = attention.nope_dim + attention.rope_dim
    return AttentionShape(
        prompt_flops=2 * heads * (key + attention.value_dim),
        decode_flops=2 * heads * (attention.cached_elements + attention.kv_compressed),
        cached=attention.cached_elements,
        query=heads * (key + attention.value_dim),
        latent=True,
    )


@dataclass(frozen=True, slots=True)
class StateShape:
    """The linear attention of one layer on one device; prompts, a token each, are computed in tiles of TILE."""

    prompt_flops: float
    prompt_bytes: float
    decode_flops: float
    sequence_bytes: float


TILE = 64
"""Tokens of a prompt that kernels of linear attention compute at once."""


def state_shape(linear: LinearAttention, width: float = 1.0) -> StateShape:
    """The linear attention of one of `width` devices.

    A token multiplies the state three times a value head, and within its tile meets every other token's key and value.
    Queries, keys and values are read, written by the convolution and read again; the output is written.
    """
    update = 6 * linear.key_dim * linear.value_dim
    tile = 2 * TILE * (linear.key_dim + linear.value_dim)
    return StateShape(
        prompt_flops=linear.value_heads * (update + tile) / width,
        prompt_bytes=(3 * linear.convolved + linear.values) * ACTIVATION_BYTES / width,
        decode_flops=linear.value_heads * update / width,
        sequence_bytes=2 * linear.sequence_bytes / width,
    )


def elementwise_bytes(model: Model, placement: Placement) -> float:
    """Bytes that one row's elementwise kernels move in a layer: norms, rotary positions, a dense FFN's activation."""
    attention, ffn, width = model.attention, model.ffn, placement.tensor_parallel
    elements = 2.0 * 4 * model.hidden_size  # a norm adds the residual: two in, two out
    if isinstance(attention, GroupedQueryAttention):
        elements += 2 * (attention.heads / width + max(attention.kv_heads / width, 1.0)) * attention.head_dim
    else:
        elements += 2 * attention.heads / width * attention.rope_dim
    if isinstance(ffn, DenseFFN):
        elements += 3 * ffn.intermediate_size / width
    return elements * ACTIVATION_BYTES
