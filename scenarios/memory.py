"""The memory of an engine: KV blocks and tiers below them, and models that are loaded when they are asked for.

The sections `engine.kv_memory`, `engine.kv_offloading`, `engine.lora_config` and `engine.weight_swapping`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.deployment.model_config import TARGET_MODULES, TargetModule, adapter_bytes
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import NAME_OR_FILE, NameOrFile
from latency_models.step_time import StepTime
from latency_models.wrapped import LoRACost, ModelSlotsStepTime
from scenarios.fields import KV_BLOCKS, Engines, Models, registered
from schedulers.engine_config import KVOffloading, TierConfig, WritePolicy
from schedulers.eviction import EVICTION_POLICIES
from schedulers.model_slots import SlotsConfig
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.deployment.models import Model


class KVMemorySpec(Strict):
    """KV blocks in the memory that weights and activations leave, of a share of a device's memory.

    Where a model has linear attention, a slot for the state of each of `max_num_seqs` sequences lies beside them.
    Without memory and model, both are those of the step times, if these know them (roofline).
    """

    memory: PositiveFloat | None = None
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    model: NameOrFile | None = None
    tensor_parallel_size: PositiveInt = 1
    weight_bytes: PositiveFloat | None = None
    cache_bytes: PositiveFloat = 2.0
    activations: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _whole(self) -> KVMemorySpec:
        stated = self.model_fields_set - {"gpu_memory_utilization"}
        if stated and not {"memory", "model"} <= stated:
            raise ValueError("expected both memory and model, or neither and no field but gpu_memory_utilization")
        return self

    def blocks(
        self,
        block_size: int,
        base: Path,
        step_time: StepTime | None = None,
        max_num_seqs: int = 256,
        reserved: float = 0.0,
        *,
        mtp: bool = False,
    ) -> int:
        """The number of blocks that fit; `reserved`: bytes of each device for something else, such as LoRA adapters.

        `mtp`: beside the weights of MTP modules, which have a KV cache, too.
        """
        if self.memory is None or self.model is None:
            return self._blocks_of(step_time, block_size, max_num_seqs, reserved, mtp)
        from latency_models.deployment.hugging_face import any_model  # builds models of pydantic

        model = any_model(self.model, base)
        joined = 2.0 * model.mtp_weights if mtp else 0.0
        model = model.with_mtp() if mtp else model
        weights = self._weights_of(model) + joined + reserved
        states = max_num_seqs * model.state_bytes_per_sequence / self.tensor_parallel_size
        free = self.memory * self.gpu_memory_utilization - weights - self.activations - states
        block = model.kv_bytes_per_token(self.cache_bytes) * block_size / self.tensor_parallel_size
        if free < block:
            taken = weights + self.activations + states
            slots = f", states of {max_num_seqs} sequences" if states else ""
            expected = f"expected more than weights{slots} and activations take ({taken:.3g} bytes)"
            raise BadInput(expected, field="engine.kv_memory.memory", value=self.memory)
        return self._within_limit(int(free // block))

    def device_weights(self, base: Path) -> float:
        """Bytes of weights on one device, of the model that this section names."""
        from latency_models.deployment.hugging_face import any_model

        assert self.model is not None, "a section without a model does not know its weights"
        return self._weights_of(any_model(self.model, base))

    def _weights_of(self, model: Model) -> float:
        stated = self.weight_bytes
        size = model.weight_bytes(model.formats()) if stated is None else model.parameters * stated
        return size / self.tensor_parallel_size

    def usable(self, step_time: StepTime | None) -> float | None:
        """Bytes of one device that the engine may use for weights and cache; None where its memory is not known."""
        deployment = step_time.measured_deployment() if step_time is not None else None
        memory = self.memory if self.memory is not None or deployment is None else deployment.memory
        return None if memory is None else memory * self.gpu_memory_utilization - self.activations

    def _blocks_of(
        self, step_time: StepTime | None, block_size: int, max_num_seqs: int, reserved: float, mtp: bool
    ) -> int:
        share = self.gpu_memory_utilization
        deployment = step_time.measured_deployment() if step_time and reserved else None
        if deployment is not None and deployment.memory is not None:
            share = max(share - reserved / deployment.memory, 0.0)
        tokens = step_time.kv_tokens(share, max_num_seqs, mtp=mtp) if step_time else None
        if tokens is None:
            raise BadInput("expected either num_gpu_blocks or kv_memory", field="engine")
        if tokens < block_size:
            expected = "expected a deployment whose weights leave room for a KV cache: more devices, or fewer bits"
            raise BadInput(expected, field="step_time")
        return self._within_limit(int(tokens // block_size))

    def _within_limit(self, blocks: int) -> int:
        if blocks > KV_BLOCKS.maximum:
            expected = f"{KV_BLOCKS.expectation(blocks)}, found room for {blocks:.3g}"
            raise BadInput(expected, field="engine.kv_memory.memory", value=self.memory)
        return blocks


class TierSpec(Strict):
    """One tier: bytes; bytes/s of its link in each direction, and seconds of each copy; what a full tier gives up."""

    capacity: PositiveFloat
    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    eviction: Annotated[str, registered(EVICTION_POLICIES)] = "lru"


class KVOffloadingSpec(Strict):
    """KV blocks that leave the device go to the engine's host memory, and from there to disk."""

    bytes_per_token: PositiveFloat
    write_policy: WritePolicy = "write_through"
    host: TierSpec
    disk: TierSpec | None = None
    engines_per_host: Engines = 1
    attention_tokens: PositiveFloat = 32768.0

    @property
    def tiers(self) -> dict[str, TierSpec]:
        """The tiers by name, nearest first."""
        return {"host": self.host} | ({} if self.disk is None else {"disk": self.disk})

    def build(self, prefix_id_tokens: int) -> KVOffloading:
        """The scheduler's settings; `ValueError` for a tier without room for one prefix id."""
        size = self.bytes_per_token * prefix_id_tokens
        tiers = tuple(TierConfig(name, int(tier.capacity / size), tier.eviction) for name, tier in self.tiers.items())
        return KVOffloading(tiers, self.write_policy, self.attention_tokens)


class LoRACostSpec(Strict):
    """Seconds that n adapters of rank r add: step + n (adapter + adapter_rank r) + rows (row + row_rank r)."""

    step: NonNegativeFloat = 0.0
    adapter: NonNegativeFloat = 0.0
    adapter_rank: NonNegativeFloat = 0.0
    row: NonNegativeFloat = 0.0
    row_rank: NonNegativeFloat = 0.0

    def at(self, rank: int) -> LoRACost:
        return LoRACost(self.step, self.adapter + rank * self.adapter_rank, self.row + rank * self.row_rank)


class LoRACostFile(Strict):
    """A measured cost (`python -m benchmarks.lora`)."""

    schema_: Literal["twin.lora-cost/1"] = Field(alias="schema")
    cost: LoRACostSpec
    about: dict[str, object] = Field(default_factory=dict)


class LinkOfModels(Strict):
    """The way of models into their slots: bytes/s from host memory or, for others, disk, and seconds of each load."""

    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    disk_bandwidth: PositiveFloat | None = None

    def seconds(self, size: float, cold: bool = False) -> float:
        """Seconds to load this many bytes; `cold`: from disk."""
        bandwidth = self.disk_bandwidth if cold and self.disk_bandwidth is not None else self.bandwidth
        return self.latency + size / bandwidth


class LoRASpec(Strict):
    """Multi-LoRA: every model of the workload is an adapter of one base model. Names are vLLM's where it has them."""

    max_loras: Models = 1
    max_cpu_loras: PositiveInt | None = None
    max_lora_rank: PositiveInt = 16
    target_modules: Annotated[list[TargetModule], Field(min_length=1)] = Field(
        default_factory=lambda: [*TARGET_MODULES]
    )
    adapter_bytes: PositiveFloat | None = None
    base_model: str = ""
    load: LinkOfModels
    cost: Annotated[LoRACostSpec | str, NAME_OR_FILE]

    @model_validator(mode="after")
    def _host(self) -> LoRASpec:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"expected max_cpu_loras of at least max_loras ({self.max_loras})")
        return self

    def slots(self) -> SlotsConfig:
        """The scheduler's settings."""
        return SlotsConfig(self.max_loras, self.max_cpu_loras, self.base_model)

    def bytes_of_adapter(self, memory: KVMemorySpec | None, base: Path, step_time: StepTime | None) -> float:
        """Bytes of an adapter on one device."""
        if self.adapter_bytes is not None:
            return self.adapter_bytes
        deployment = step_time.measured_deployment() if step_time is not None else None
        model, ranks = (None, 1) if deployment is None else (deployment.model, deployment.ranks or 1)
        if memory is not None and memory.model is not None:
            from latency_models.deployment.hugging_face import any_model  # builds models of pydantic

            model, ranks = any_model(memory.model, base), memory.tensor_parallel_size
        size = None if model is None else adapter_bytes(model, self.max_lora_rank, self.target_modules, ranks)
        if size is None:
            expected = "expected adapter_bytes, unless kv_memory or step_time name a model of dense layers"
            raise BadInput(expected, field="engine.lora_config")
        return size

    def cost_at_rank(self, base: Path) -> LoRACost:
        if isinstance(self.cost, LoRACostSpec):
            return self.cost.at(self.max_lora_rank)
        path = base / self.cost
        return checked(LoRACostFile, read_yaml(path), path).cost.at(self.max_lora_rank)

    @property
    def assumed_cost(self) -> str:
        """A note on a cost that the scenario states; empty where a file has a measured one."""
        if not isinstance(self.cost, LoRACostSpec):
            return ""
        cost = self.cost.at(self.max_lora_rank)
        return (
            f"assumed, not measured: adapters add {1e6 * cost.step:.4g} µs to a step that has any, "
            f"{1e6 * cost.adapter:.4g} µs for each distinct one and {1e6 * cost.row:.4g} µs a row (the section cost of "
            "LoRA; benchmarks.lora measures it)"
        )

    def with_adapters(self, step_time: StepTime, memory: KVMemorySpec | None, base: Path) -> StepTime:
        """Step times with those of adapters and of their loads."""
        size = self.bytes_of_adapter(memory, base, step_time)
        load, cold = self.load.seconds(size), self.load.seconds(size, cold=True)
        return ModelSlotsStepTime(step_time, self.cost_at_rank(base), load, cold, self.base_model)


class WeightSwappingSpec(Strict):
    """Models whose whole weights are swapped: the engine computes one of them at a time.

    docs/reference/serving-scenario.md describes every field.
    """

    resident: Models | Literal["auto"] = "auto"
    kv_share: float = Field(default=0.25, gt=0, lt=1)
    models: Models | None = None
    host_models: PositiveInt | None = None
    weight_bytes: PositiveFloat | None = None
    load: LinkOfModels
    keep_alive: NonNegativeFloat | None = None
    turn: NonNegativeFloat = 0.0

    def bytes_of_model(self, memory: KVMemorySpec | None, base: Path, step_time: StepTime | None) -> float:
        """Bytes of a model's weights on one device."""
        if self.weight_bytes is not None:
            return self.weight_bytes
        if memory is not None and memory.model is not None:
            return memory.device_weights(base)
        deployment = step_time.measured_deployment() if step_time is not None else None
        if deployment is None or deployment.weights is None:
            expected = "expected weight_bytes, unless kv_memory or step_time know the model"
            raise BadInput(expected, field="engine.weight_swapping")
        return deployment.weights

    def num_resident(self, memory: KVMemorySpec | None, base: Path, step_time: StepTime | None) -> int:
        """Models whose weights the device holds."""
        if self.resident != "auto":
            return self.resident
        size = self.bytes_of_model(memory, base, step_time)
        capacity = (memory or KVMemorySpec()).usable(step_time)
        if capacity is None:
            expected = "expected a number, since neither kv_memory nor step_time know the memory"
            raise BadInput(expected, field="engine.weight_swapping.resident", value=self.resident)
        fitting = max(int(capacity * (1 - self.kv_share) // size), 1)
        return fitting if self.models is None else min(fitting, self.models)

    def slots(self, memory: KVMemorySpec | None, base: Path, step_time: StepTime | None) -> SlotsConfig:
        """The scheduler's settings."""
        resident = self.num_resident(memory, base, step_time)
        host = None if self.host_models is None else max(self.host_models, resident)
        return SlotsConfig(resident, host, exclusive=True, turn=self.turn, keep_alive=self.keep_alive)

    def with_loads(self, step_time: StepTime, memory: KVMemorySpec | None, base: Path) -> StepTime:
        """Step times with loads of weights."""
        size = self.bytes_of_model(memory, base, step_time)
        load, cold = self.load.seconds(size), self.load.seconds(size, cold=True)
        return ModelSlotsStepTime(step_time, LoRACost(), load, cold)
