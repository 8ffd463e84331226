"""Step times of an engine that keeps models in slots: LoRA adapters in a batch, and loads of adapters or weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from latency_models.origin import MeasuredDeployment
from latency_models.step_time import StepTime, StepTimeModel
from latency_models.unknowns import Unknown
from schedulers.batches import Batch
from schedulers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class LoRACost:
    """Seconds that LoRA adapters add to a step: step + adapters · adapter + rows · row, at one rank.

    Attributes:
        step: once, if the step has an adapter. adapter: for each distinct adapter. row: for each row that has one.
    """

    step: float = 0.0
    adapter: float = 0.0
    row: float = 0.0

    def seconds(self, adapters: int, rows: int) -> float:
        """Seconds of a step with `rows` rows of `adapters` adapters."""
        return self.step + adapters * self.adapter + rows * self.row if adapters else 0.0


class _OnBase(StepTimeModel):
    """Step times made of others, with their unknowns, their origin, and the memory of the same device.

    Attributes:
        base: the others. What slots take of the memory is not counted, and a part of a device has that of the whole.
    """

    base: StepTime

    def unknowns(self) -> tuple[Unknown, ...]:
        """See `StepTime.unknowns`."""
        return self.base.unknowns()

    def outside(self) -> Mapping[str, float]:
        """See `StepTime.outside`."""
        return self.base.outside()

    def measured_deployment(self) -> MeasuredDeployment | None:
        """See `StepTime.measured_deployment`."""
        return self.base.measured_deployment()

    def kv_tokens(self, gpu_memory_utilization: float, max_num_seqs: int) -> float | None:
        """See `StepTime.kv_tokens`."""
        return self.base.kv_tokens(gpu_memory_utilization, max_num_seqs)


class ModelSlotsStepTime(_OnBase):
    """A step of the base model, the products of its adapters, and the loads before it.

    Args:
        base: step times without adapters. cost: of adapters. load, cold_load: seconds to load a model from host memory,
            and from disk. base_model: whose requests have no adapter.
    """

    def __init__(self, base: StepTime, cost: LoRACost, load: float, cold_load: float, base_model: str = "") -> None:
        self.base, self.cost, self.base_model = base, cost, base_model
        self.load, self.cold_load = load, cold_load

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        adapters, rows = self._adapters(batch.decodes)
        for sequence, drafted in zip(batch.decodes, batch.draft_tokens, strict=False):
            rows += drafted if sequence.request.model != self.base_model else 0
        for chunk in batch.chunks:
            model = chunk.sequence.request.model
            if model != self.base_model:
                adapters.add(model)
                rows += chunk.tokens
        seconds = self.base.seconds(batch) + self.cost.seconds(len(adapters), rows)
        for load in batch.loads:
            seconds += self.cold_load if load.cold else self.load
        return seconds

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """See `StepTime.decode_seconds`: without adapters, whose seconds are `adapter_seconds`."""
        return self.base.decode_seconds(decodes, kv, longest, steps)

    def adapter_seconds(self, decodes: Iterable[Sequence]) -> float:
        """See `StepTime.adapter_seconds`."""
        adapters, rows = self._adapters(decodes)
        return self.cost.seconds(len(adapters), rows)

    def _adapters(self, decodes: Iterable[Sequence]) -> tuple[set[str], int]:
        """The adapters of decoding sequences, and the sequences that have one."""
        models = [sequence.request.model for sequence in decodes if sequence.request.model != self.base_model]
        return set(models), len(models)

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        """See `StepTime.vary`."""
        return ModelSlotsStepTime(self.base.vary(scores), self.cost, self.load, self.cold_load, self.base_model)


class PartitionedStepTime(_OnBase):
    """Steps on an equal part of a device: of its compute units and of its bandwidth, as MIG and MPS give them out.

    Every step takes `parts` times as long as on the whole device. The host's overhead would not grow, so that this is
    an upper bound.
    """

    def __init__(self, base: StepTime, parts: int) -> None:
        self.base, self.parts = base, parts

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        return self.base.seconds(batch) * self.parts

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """See `StepTime.decode_seconds`."""
        return [seconds * self.parts for seconds in self.base.decode_seconds(decodes, kv, longest, steps)]

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        """See `StepTime.vary`."""
        return PartitionedStepTime(self.base.vary(scores), self.parts)
