"""The placement of a model on the devices of one engine, and the bytes of weights and KV cache on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from latency_models.deployment.hardware import Hardware, Precision
from latency_models.deployment.models import OF_EXPERTS, ROUTER, ExpertFFN, GroupedQueryAttention, Model
from latency_models.deployment.models import WEIGHT_BYTES as WEIGHT_BYTES
from latency_models.deployment.models import Weights as Weights
from latency_models.stages import stage_layers
from workloads.errors import BadInput

Cache: TypeAlias = Literal["bf16", "fp8"]

CACHE_BYTES: dict[Cache, float] = {"bf16": 2.0, "fp8": 1.0}
"""Bytes of one cached element."""

COMPUTED_IN: dict[Weights, Precision] = {
    "bf16": "bf16", "fp8": "fp8", "int8": "int8", "fp4": "fp4", "mxfp4": "bf16", "int4": "bf16",
}  # fmt: skip
"""The precision that multiplies weights of a format: kernels unpack MXFP4 and INT4 to bf16."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A model on the devices of one engine.

    `data_parallel`: attention replicas that share one set of experts, as `engine.data_parallel_size`.
    `expert_parallel`: experts are spread whole over all devices of a stage; else each is split over all of them.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    weights: Weights = "bf16"
    experts: Weights = "bf16"
    cache: Cache = "bf16"

    @property
    def devices(self) -> int:
        """Devices of the engine."""
        return self.stage_devices * self.pipeline_parallel

    @property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage, which share one set of experts."""
        return self.tensor_parallel * self.data_parallel


def check_placement(model: Model, hardware: Hardware, placement: Placement) -> None:
    """Refuse a split that does not divide the model, and formats that the device does not compute in."""
    ffn = model.ffn
    _check_heads(model, placement.tensor_parallel)
    if placement.pipeline_parallel > model.layers:
        expected = f"expected at most the layers there are ({model.layers})"
        raise BadInput(expected, field="pipeline_parallel", value=placement.pipeline_parallel)
    if isinstance(ffn, ExpertFFN):
        _check_formats(hardware, "experts", placement.experts)
        if placement.expert_parallel and placement.stage_devices > ffn.experts:
            expected = f"expected at most one device for each of the {ffn.experts} experts"
            raise BadInput(expected, field="expert_parallel", value=placement.stage_devices)
    else:
        expected = f"expected {{}}, since {model.name} has no experts"
        if placement.data_parallel != 1:
            raise BadInput(expected.format(1), field="data_parallel", value=placement.data_parallel)
        if placement.expert_parallel:
            raise BadInput(expected.format("false"), field="expert_parallel", value=True)
    _check_formats(hardware, "weights", placement.weights)
    if placement.weights in OF_EXPERTS:
        expected = f"expected another format: {placement.weights.upper()} is known of experts only"
        raise BadInput(expected, field="weights", value=placement.weights)


def _check_heads(model: Model, width: int) -> None:
    """Refuse a number of devices that does not divide the heads of attention."""
    attention = model.attention
    if attention.heads % width:
        raise BadInput(f"expected a divisor of the {attention.heads} heads", field="tensor_parallel", value=width)
    if isinstance(attention, GroupedQueryAttention):
        smaller, larger = sorted((attention.kv_heads, width))
        if larger % smaller:
            expected = f"expected a divisor or a multiple of the {attention.kv_heads} KV heads"
            raise BadInput(expected, field="tensor_parallel", value=width)
    linear = model.linear_attention
    if linear and linear.key_heads % width:
        expected = f"expected a divisor of the {linear.key_heads} key heads of linear attention"
        raise BadInput(expected, field="tensor_parallel", value=width)


def _check_formats(hardware: Hardware, field: str, weights: Weights) -> None:
    if COMPUTED_IN[weights] not in hardware.peak_flops:
        formats = ", ".join(name for name, computed in COMPUTED_IN.items() if computed in hardware.peak_flops)
        raise BadInput(f"expected one that {hardware.name} computes with: {formats}", field=field, value=weights)


RESERVED = 2 * 2**30
"""Bytes of a device that are neither weights nor KV cache: activations, buffers of collectives, the CUDA context.
Assumed: engines measure it when they start."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the fullest device of an engine, bytes.

    `free`: for the KV cache; negative if the weights do not fit. `kv_bytes_per_token`: in layers of full attention.
    `state_bytes`: of slots for windows and states of linear attention. `kv_tokens`: that fit, for one attention
    replica.
    """

    capacity: float
    weights: float
    reserved: float
    free: float
    kv_bytes_per_token: float
    state_bytes: float = 0.0

    @property
    def kv_tokens(self) -> float:
        """Tokens that the cache holds; 0 if the weights do not fit."""
        return max(self.free, 0.0) / self.kv_bytes_per_token


def device_memory(
    model: Model,
    hardware: Hardware,
    placement: Placement,
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int = 256,
    *,
    mtp: bool = False,
) -> DeviceMemory:
    """The memory of the device whose cache holds the fewest tokens: all stages of a pipeline have as many KV blocks.

    Windows and the states of linear attention are set aside for `max_num_seqs` sequences. `mtp`: MTP modules are
    loaded, with a KV cache of their own; the matrix of each is whole on every device, in bf16.
    """
    stages = range(placement.pipeline_parallel)
    joined = model.mtp_weights * 2.0 if mtp else 0.0
    model = model.with_mtp() if mtp else model
    stages_memory = [
        _stage_memory(model, hardware, placement, stage, gpu_memory_utilization, max_num_seqs, joined)
        for stage in stages
    ]
    return min(stages_memory, key=lambda memory: memory.free / memory.kv_bytes_per_token)


def _stage_memory(
    model: Model,
    hardware: Hardware,
    placement: Placement,
    stage: int,
    gpu_memory_utilization: float,
    max_num_seqs: int,
    joined: float,
) -> DeviceMemory:
    """The memory of a device of one pipeline stage, which has its share of each kind of layer.

    `joined`: bytes of what MTP modules have beside their layers.
    """
    layers = stage_layers(model.layers, placement.pipeline_parallel)[stage]
    share = layers / model.layers
    cached = _cached_elements(model, placement) * CACHE_BYTES[placement.cache]
    full = layers * (1 - (model.layers - model.attention_layers + model.windowed_layers) / model.layers)
    token = cached * full + share * model.indexer_layers * (model.indexer.cached_bytes if model.indexer else 0.0)
    slot = share * model.state_bytes_per_sequence / placement.tensor_parallel
    if isinstance(model.attention, GroupedQueryAttention):
        slot += model.attention.window * cached * share * model.windowed_layers
    slots = max_num_seqs * slot
    weights = share * _layers_bytes(model, placement) + _embedding_bytes(model, placement, stage) + joined
    usable = hardware.memory_capacity * gpu_memory_utilization
    free = usable - weights - RESERVED - slots
    return DeviceMemory(hardware.memory_capacity, weights, RESERVED, free, token, slots)


def _cached_elements(model: Model, placement: Placement) -> float:
    """Elements of one token in one layer. KV heads are split over devices down to one; a latent vector is not split."""
    attention = model.attention
    if isinstance(attention, GroupedQueryAttention):
        return 2 * max(attention.kv_heads / placement.tensor_parallel, 1.0) * attention.head_dim
    return attention.cached_elements


def _layers_bytes(model: Model, placement: Placement) -> float:
    """Weights of all layers, of which some may be of another kind, on one device."""
    ffn, hidden, width = model.ffn, model.hidden_size, placement.tensor_parallel
    norms = model.attention_layers * model.attention.norm_weights + (model.mixers + model.layers_with_ffn) * hidden
    linear, expert = WEIGHT_BYTES[placement.weights], WEIGHT_BYTES[placement.experts]
    size = sum(
        times * columns * inner * (2.0 if name == ROUTER else linear)
        for times, (name, columns, inner) in model.projections(width)
    )
    size += model.indexer_layers * model.indexer.norm_weights * linear if model.indexer else 0.0
    size += norms * 2.0
    size += model.linear_layers * model.linear_attention.small_weights * 2.0 / width if model.linear_attention else 0.0
    if isinstance(ffn, ExpertFFN):
        size += model.expert_layers * ffn.experts * ffn.expert_weights(hidden) / placement.stage_devices * expert
    return size


def _embedding_bytes(model: Model, placement: Placement, stage: int) -> float:
    """The embedding on the first stage and the output head on the last, in bf16. Where they are tied, they are one."""
    ends = {0, placement.pipeline_parallel - 1}
    matrices = 0 if stage not in ends else 2 if len(ends) == 1 and not model.tied_embeddings else 1
    return matrices * model.vocabulary * model.hidden_size * 2.0 / placement.tensor_parallel
