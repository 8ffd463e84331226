"""The KV memory of an engine: `engine.kv_memory`, and the tiers below it, `engine.kv_offloading`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.builtin_files import NameOrFile
from latency_models.io.config_io import Strict
from latency_models.step_time import StepTime
from scenarios.limits import KV_BLOCKS, Engines
from scenarios.policies import registered
from schedulers.engine_config import KVOffloading, TierConfig, WritePolicy
from schedulers.tier_eviction import EVICTION_POLICIES
from workloads.errors import BadInput


class KVMemorySpec(Strict):
    """KV blocks in the memory that weights and activations leave, of a share of a device's memory.

    Attributes:
        memory: of one device, bytes. gpu_memory_utilization: the share of it that the engine may use.
        model: a model file. Without memory and model, both are those of the step times, if these know them (roofline);
            the other fields but `gpu_memory_utilization` are then left out, too.
        tensor_parallel_size: devices over which weights and cache are spread.
        weight_bytes: of one weight; None: those of the weights as published. cache_bytes: of one cached element.
        activations: bytes to leave for them.
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
    ) -> int:
        """The number of blocks that fit.

        Args:
            step_time: the model that knows memory and weights where this section does not state them.
            reserved: bytes of each device that hold something else, such as LoRA adapters.
        """
        if self.memory is None or self.model is None:
            return self._blocks_of(step_time, block_size, max_num_seqs, reserved)
        from latency_models.deployment.hugging_face import any_model  # builds models of pydantic

        model = any_model(self.model, base)
        weights = self.device_weights(base) + reserved
        free = self.memory * self.gpu_memory_utilization - weights - self.activations
        block = model.kv_bytes(self.cache_bytes) * model.layers * block_size / self.tensor_parallel_size
        if free < block:
            expected = f"expected more than weights and activations take ({weights + self.activations:.3g} bytes)"
            raise BadInput(expected, field="engine.kv_memory.memory", value=self.memory)
        return self._within_limit(int(free // block))

    def device_weights(self, base: Path) -> float:
        """Bytes of weights on one device, of the model that this section names."""
        from latency_models.deployment.hugging_face import any_model

        assert self.model is not None, "a section without a model does not know its weights"
        model, stated = any_model(self.model, base), self.weight_bytes
        size = model.weight_bytes(model.formats()) if stated is None else model.parameters * stated
        return size / self.tensor_parallel_size

    def usable(self, step_time: StepTime | None) -> float | None:
        """Bytes of one device that the engine may use for weights and cache; None where its memory is not known."""
        deployment = step_time.measured_deployment() if step_time is not None else None
        memory = self.memory if self.memory is not None or deployment is None else deployment.memory
        return None if memory is None else memory * self.gpu_memory_utilization - self.activations

    def _blocks_of(self, step_time: StepTime | None, block_size: int, max_num_seqs: int, reserved: float) -> int:
        """The blocks for which the step times have memory."""
        share = self.gpu_memory_utilization
        deployment = step_time.measured_deployment() if step_time and reserved else None
        if deployment is not None and deployment.memory is not None:
            share = max(share - reserved / deployment.memory, 0.0)
        tokens = step_time.kv_tokens(share, max_num_seqs) if step_time else None
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
    """KV blocks that leave the device go to host memory, and from there to disk.

    Attributes:
        bytes_per_token: of KV cache. write_policy, attention_tokens: see `schedulers.engine_config.KVOffloading`.
        host, disk: the tiers of one engine. engines_per_host: so many engines of a pool share the links to load from.
    """

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
        """The scheduler's settings.

        Raises:
            ValueError: a tier without room for one prefix id.
        """
        size = self.bytes_per_token * prefix_id_tokens
        tiers = tuple(TierConfig(name, int(tier.capacity / size), tier.eviction) for name, tier in self.tiers.items())
        return KVOffloading(tiers, self.write_policy, self.attention_tokens)
