"""The placement of a model on the devices of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from latency_models.deployment.formats import WEIGHT_BYTES as WEIGHT_BYTES
from latency_models.deployment.formats import Weights as Weights
from latency_models.deployment.hardware import Hardware, Precision
from latency_models.deployment.models import ExpertFFN, GroupedQueryAttention, Model
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
        few, many = sorted((attention.kv_heads, width))
        if many % few:
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
        known = ", ".join(name for name, computed in COMPUTED_IN.items() if computed in hardware.peak_flops)
        raise BadInput(f"expected one that {hardware.name} computes with: {known}", field=field, value=weights)
