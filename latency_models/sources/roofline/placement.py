"""The placement of a model on the devices of one engine, and the bytes of weights and KV cache on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from latency_models.deployment.hardware import Hardware, Precision
from latency_models.deployment.models import WEIGHT_BYTES as WEIGHT_BYTES
from latency_models.deployment.models import ExpertFFN, GroupedQueryAttention, Model
from latency_models.deployment.models import Weights as Weights
from latency_models.stages import stage_layers
from workloads.errors import BadInput

Cache: TypeAlias = Literal["bf16", "fp8"]

CACHE_BYTES: dict[Cache, float] = {"bf16": 2.0, "fp8": 1.0}
"""Bytes of one cached element."""

COMPUTED_IN: dict[Weights, Precision] = {"bf16": "bf16", "fp8": "fp8", "int8": "int8", "fp4": "fp4", "mxfp4": "bf16"}
"""The precision that multiplies weights of a format: kernels unpack MXFP4 to bf16."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A model on the devices of one engine.

    Attributes:
        tensor_parallel: devices that share each attention layer, and each dense FFN.
        pipeline_parallel: stages, each with a part of the layers.
        data_parallel: attention replicas that share one set of experts, as `engine.data_parallel_size`.
        expert_parallel: experts are spread whole over all devices of a stage; else each is split over all of them.
        weights: format of projections and dense FFNs. experts: format of expert weights.
        cache: format of the KV cache.
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
    attention, ffn, width = model.attention, model.ffn, placement.tensor_parallel
    if attention.heads % width:
        raise BadInput(f"expected a divisor of the {attention.heads} heads", field="tensor_parallel", value=width)
    if isinstance(attention, GroupedQueryAttention):
        smaller, larger = sorted((attention.kv_heads, width))
        if larger % smaller:
            expected = f"expected a divisor or a multiple of the {attention.kv_heads} KV heads"
            raise BadInput(expected, field="tensor_parallel", value=width)
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
    if placement.weights == "mxfp4":
        raise BadInput("expected another format: MXFP4 is known of experts only", field="weights", value="mxfp4")


def _check_formats(hardware: Hardware, field: str, weights: Weights) -> None:
    if COMPUTED_IN[weights] not in hardware.peak_flops:
        formats = ", ".join(name for name, computed in COMPUTED_IN.items() if computed in hardware.peak_flops)
        raise BadInput(f"expected one that {hardware.name} computes with: {formats}", field=field, value=weights)


RESERVED = 2 * 2**30
"""Bytes of a device that are neither weights nor KV cache: activations, buffers of collectives, the CUDA context.
Assumed: engines measure it when they start."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the fullest device of an engine.

    Attributes:
        capacity: bytes of the device. weights: bytes of weights on it. reserved: see RESERVED.
        free: bytes for the KV cache; negative if the weights do not fit.
        kv_bytes_per_token: bytes of one token in the cache on it, in layers of full attention.
        kv_tokens: tokens that fit, for one attention replica.
    """

    capacity: float
    weights: float
    reserved: float
    free: float
    kv_bytes_per_token: float

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
) -> DeviceMemory:
    """The memory of the device whose cache holds the fewest tokens: all stages of a pipeline have as many KV blocks.

    Layers with a window cache no more of a sequence than that: it is set aside for `max_num_seqs` sequences.
    """
    stages = range(placement.pipeline_parallel)
    stages_memory = [
        _stage_memory(model, hardware, placement, stage, gpu_memory_utilization, max_num_seqs) for stage in stages
    ]
    return min(stages_memory, key=lambda memory: memory.free / memory.kv_bytes_per_token)


def _stage_memory(
    model: Model, hardware: Hardware, placement: Placement, stage: int, gpu_memory_utilization: float, max_num_seqs: int
) -> DeviceMemory:
    """The memory of a device of one pipeline stage."""
    layers = stage_layers(model.layers, placement.pipeline_parallel)[stage]
    cached = _cached_elements(model, placement) * CACHE_BYTES[placement.cache]
    full = layers * (1 - model.windowed_layers / model.layers)
    windows = 0.0
    if isinstance(model.attention, GroupedQueryAttention):
        windows = max_num_seqs * model.attention.window * cached * (layers - full)
    weights = layers * _layer_bytes(model, placement) + _embedding_bytes(model, placement, stage)
    usable = hardware.memory_capacity * gpu_memory_utilization
    free = usable - weights - RESERVED - windows
    return DeviceMemory(hardware.memory_capacity, weights, RESERVED, free, cached * full)


def _cached_elements(model: Model, placement: Placement) -> float:
    """Elements of one token in one layer. KV heads are split over devices down to one; a latent vector is not split."""
    attention = model.attention
    if isinstance(attention, GroupedQueryAttention):
        return 2 * max(attention.kv_heads / placement.tensor_parallel, 1.0) * attention.head_dim
    return attention.cached_elements


def _layer_bytes(model: Model, placement: Placement) -> float:
    """Weights of one layer on one device; the mean, where the first layers are dense."""
    attention, ffn, hidden, width = model.attention, model.ffn, model.hidden_size, placement.tensor_parallel
    linear, expert = WEIGHT_BYTES[placement.weights], WEIGHT_BYTES[placement.experts]
    if isinstance(attention, GroupedQueryAttention):
        kv_heads = max(attention.kv_heads / width, 1.0)
        projections = hidden * attention.head_dim * 2 * (attention.heads / width + kv_heads)
    else:
        shared = hidden * (attention.q_compressed + attention.cached_elements)
        projections = shared + (attention.projection_weights(hidden) - shared) / width
    size = projections * linear + (attention.norm_weights + 2 * hidden) * 2.0
    if not isinstance(ffn, ExpertFFN):
        return size + ffn.weights(hidden) / width * linear
    sparse = (model.layers - ffn.dense_layers) / model.layers
    routed = ffn.experts * ffn.expert_weights(hidden) / placement.stage_devices * expert
    unrouted = ffn.shared_experts * ffn.expert_weights(hidden) / width * linear + ffn.experts * hidden * 2.0
    dense = 3 * hidden * ffn.dense_intermediate_size / width * linear
    return size + sparse * (routed + unrouted) + (1 - sparse) * dense


def _embedding_bytes(model: Model, placement: Placement, stage: int) -> float:
    """The embedding on the first stage and the output head on the last, in bf16. Where they are tied, they are one."""
    ends = {0, placement.pipeline_parallel - 1}
    matrices = 0 if stage not in ends else 2 if len(ends) == 1 and not model.tied_embeddings else 1
    return matrices * model.vocabulary * model.hidden_size * 2.0 / placement.tensor_parallel
