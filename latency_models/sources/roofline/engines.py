"""One engine as a planner sees it: its step times, memory and KV cache, or the reason why it cannot be had."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import WEIGHT_BYTES, ExpertFFN, Formats, Model, Weights
from latency_models.sources.roofline.placement import Cache, DeviceMemory, Placement, check_placement, device_memory
from workloads.errors import BadInput

BLOCK_SIZE = 16
"""Tokens of a KV block, as vLLM has it by default."""


@dataclass(frozen=True, slots=True)
class EngineOption:
    """One engine that can be had, with its `step_time` section and blocks of one attention replica."""

    devices: int
    step_time: dict[str, Any]
    memory: DeviceMemory
    num_gpu_blocks: int
    data_parallel: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV caches of all its attention replicas hold."""
        return self.num_gpu_blocks * BLOCK_SIZE * self.data_parallel

    def engine(self) -> dict[str, Any]:
        """The fields that this option gives an `engine` section."""
        ranks = {"data_parallel_size": self.data_parallel} if self.data_parallel > 1 else {}
        return {"num_gpu_blocks": self.num_gpu_blocks, "block_size": BLOCK_SIZE, **ranks}


@dataclass(frozen=True, slots=True)
class NoEngine:
    """One engine that cannot be had, and why: a line for a ledger. `fits`: memory is not the reason."""

    reason: str
    fits: bool = True


def engine_option(
    model: str | Path,
    hardware: str | Path,
    placement: Placement,
    *,
    base: Path = Path(),
    gpu_memory_utilization: float = 0.9,
    max_num_seqs: int = 256,
    max_model_len: int = 0,
) -> EngineOption | NoEngine:
    """The engine of a model on a device, or why there is none; `max_model_len`: tokens that the cache must hold."""
    shapes, device = any_model(model, base), load_hardware(hardware, base)
    try:
        check_placement(shapes, device, placement)
    except BadInput as error:
        return NoEngine(f"{error.field} {error.value}: {error.expected}")
    memory = device_memory(shapes, device, placement, gpu_memory_utilization, max_num_seqs)
    if memory.free <= 0:
        return NoEngine(_too_large(shapes, device, placement, memory, gpu_memory_utilization), fits=False)
    tokens = int(memory.kv_tokens)
    if tokens < max(max_model_len, BLOCK_SIZE):
        reason = f"the KV cache holds {tokens:,} tokens, and a request has up to {max(max_model_len, BLOCK_SIZE):,}"
        return NoEngine(reason, fits=False)
    return EngineOption(
        devices=placement.devices,
        step_time=step_time_section(model, hardware, placement, base),
        memory=memory,
        num_gpu_blocks=tokens // BLOCK_SIZE,
        data_parallel=placement.data_parallel,
    )


def step_time_section(
    model: str | Path, hardware: str | Path, placement: Placement, base: Path = Path()
) -> dict[str, Any]:
    """The `step_time` section of a placement, without the fields that have their defaults."""
    section: dict[str, Any] = {"source": "roofline", "model": str(model), "hardware": str(hardware)}
    usual = Placement()
    names = ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "cache")
    section |= {name: getattr(placement, name) for name in names if getattr(placement, name) != getattr(usual, name)}
    if Formats(placement.weights, placement.experts) == any_model(model, base).published_formats:
        return section
    experts = {"experts": placement.experts} if placement.experts != placement.weights else {}
    return section | {"weights": placement.weights} | experts


def placements(
    model: str | Path,
    *,
    weights: Weights | None = None,
    cache: Cache = "bf16",
    most_devices: int = 8,
    pipelines: bool = False,
    base: Path = Path(),
) -> list[Placement]:
    """The parallelisms to try for a model, by devices: powers of two. `engine_option` refuses those that do not fit.

    Experts are split over all devices (tensor parallel), or spread whole with as many attention replicas.
    """
    shapes = any_model(model, base)
    sparse, formats = isinstance(shapes.ffn, ExpertFFN), shapes.formats(weights)
    options = []
    devices = 1
    while devices <= most_devices:
        stages = 1
        while stages <= (devices if pipelines else 1):
            width = devices // stages
            options.append(Placement(width, stages, 1, False, formats.linear, formats.experts, cache))
            replicas = 2
            while sparse and replicas <= width:
                spread = Placement(width // replicas, stages, replicas, True, formats.linear, formats.experts, cache)
                options.append(spread)
                replicas *= 2
            stages *= 2
        devices *= 2
    return options


def _too_large(model: Model, hardware: Hardware, placement: Placement, memory: DeviceMemory, share: float) -> str:
    usable = hardware.memory_capacity * share - memory.reserved
    formats = Formats(placement.weights, placement.experts if isinstance(model.ffn, ExpertFFN) else placement.weights)
    a_weight = f" ({WEIGHT_BYTES[formats.linear]:g} bytes a weight)" if formats.linear == formats.experts else ","
    return (
        f"{model.name} in {formats}{a_weight} puts "
        f"{memory.weights / 1e9:.1f} GB on each of {placement.devices} {hardware.name}, which has "
        f"{usable / 1e9:.1f} GB for weights and cache"
    )
