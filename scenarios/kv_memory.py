"""KV blocks of an engine from the memory of its devices: `engine.kv_memory`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.deployment.models import load_model
from latency_models.io.config_io import Strict
from latency_models.io.paths import NameOrFile
from scenarios.limits import KV_BLOCKS
from workloads.errors import BadInput


class KVMemorySpec(Strict):
    """KV blocks in the memory that weights and activations leave, of a share of a device's memory.

    Attributes:
        memory: of one device, bytes. gpu_memory_utilization: the share of it that the engine may use.
        model: a model file.
        tensor_parallel_size: devices over which weights and cache are spread.
        weight_bytes, cache_bytes: of one weight and one cached element. activations: bytes to leave for them.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "utilization": "gpu_memory_utilization",
        "tensor_parallel": "tensor_parallel_size",
    }

    memory: PositiveFloat
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    model: NameOrFile
    tensor_parallel_size: PositiveInt = 1
    weight_bytes: PositiveFloat = 2.0
    cache_bytes: PositiveFloat = 2.0
    activations: NonNegativeFloat = 0.0

    def blocks(self, block_size: int, base: Path) -> int:
        """The number of blocks that fit.

        Raises:
            BadInput: none do, or more than the limit.
        """
        model = load_model(self.model, base)
        weights = model.parameters * self.weight_bytes / self.tensor_parallel_size
        free = self.memory * self.gpu_memory_utilization - weights - self.activations
        block = model.kv_bytes(self.cache_bytes) * model.layers * block_size / self.tensor_parallel_size
        if free < block:
            expected = f"expected more than weights and activations take ({weights + self.activations:.3g} bytes)"
            raise BadInput(expected, field="engine.kv_memory.memory", value=self.memory)
        blocks = int(free // block)
        if blocks > KV_BLOCKS.most:
            expected = f"{KV_BLOCKS.expectation(blocks)}, found room for {blocks:.3g}"
            raise BadInput(expected, field="engine.kv_memory.memory", value=self.memory)
        return blocks
