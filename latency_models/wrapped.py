"""Step times made of those of other models: with a draft model, with LoRA adapters and loads, on a part of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from latency_models.step_time import ChunkTable, StepTime, Unknown
from schedulers.batches import Batch
from schedulers.parallel_cores import GroupBatch
from schedulers.sequence import Sequence as EngineSequence

if TYPE_CHECKING:
    from latency_models.step_time import MeasuredDeployment

DRAFT = "draft."
"""Begins the names of the draft model's unknowns."""


class WrappedStepTime(StepTime):
    """Step times made of those of `base`, with its decode steps, unknowns, origin and memory."""

    base: StepTime

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return self.base.decode_seconds(decodes, kv, longest, steps)

    def unknowns(self) -> tuple[Unknown, ...]:
        return self.base.unknowns()

    def outside(self) -> Mapping[str, float]:
        return self.base.outside()

    def measured_deployment(self) -> MeasuredDeployment | None:
        return self.base.measured_deployment()

    def kv_tokens(self, gpu_memory_utilization: float, max_num_seqs: int, *, mtp: bool = False) -> float | None:
        return self.base.kv_tokens(gpu_memory_utilization, max_num_seqs, mtp=mtp)


@dataclass(eq=False)
class DraftedStepTime(WrappedStepTime):
    """A step of the target model, then as many passes of the draft model as the longest draft has tokens.

    The first pass of the draft model computes what the step computed; each further one, one token of each decode. Steps
    in which nothing is drafted have its pass over prompts alone, which fills its cache. Memory is the target's.
    """

    base: StepTime
    draft: StepTime

    def seconds(self, batch: Batch) -> float:
        seconds = self.base.seconds(batch)
        depth = max(batch.draft_tokens, default=0)
        if not (depth or batch.chunks):
            return seconds
        decodes = batch.decodes if depth else ()
        kv, longest = (batch.decode_kv, batch.longest_decode) if depth else (0, 0)
        seconds += self.draft.seconds(type(batch)(batch.chunks, decodes, kv, longest))
        if depth > 1 and decodes:
            n = batch.n_decodes
            seconds += sum(self.draft.decode_seconds(n, kv + n, longest + 1, depth - 1))
        return seconds

    def unknowns(self) -> tuple[Unknown, ...]:
        drafts = (replace(unknown, name=DRAFT + unknown.name) for unknown in self.draft.unknowns())
        return (*self.base.unknowns(), *drafts)

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        target = {name: score for name, score in scores.items() if not name.startswith(DRAFT)}
        drafts = {name.removeprefix(DRAFT): score for name, score in scores.items() if name.startswith(DRAFT)}
        return DraftedStepTime(self.base.vary(target), self.draft.vary(drafts))

    def outside(self) -> Mapping[str, float]:
        return {**self.base.outside(), **{DRAFT + axis: value for axis, value in self.draft.outside().items()}}


@dataclass(frozen=True, slots=True)
class LoRACost:
    """Seconds that LoRA adapters add to a step: step + adapters · adapter + rows · row, at one rank."""

    step: float = 0.0
    adapter: float = 0.0
    row: float = 0.0

    def seconds(self, adapters: int, rows: int) -> float:
        """Seconds of a step with `rows` rows of `adapters` adapters."""
        return self.step + adapters * self.adapter + rows * self.row if adapters else 0.0


@dataclass(eq=False)
class ModelSlotsStepTime(WrappedStepTime):
    """A step of the base model, the products of its adapters, and the (cold) loads before it.

    `decode_seconds` is without adapters, whose seconds are `adapter_seconds`. The memory of the slots is not counted.
    """

    base: StepTime
    cost: LoRACost
    load: float
    cold_load: float
    base_model: str = ""

    def seconds(self, batch: Batch) -> float:
        adapters, rows = self._adapters(batch.decodes)
        for sequence, draft in zip(batch.decodes, batch.draft_tokens, strict=False):
            rows += draft if sequence.request.model != self.base_model else 0
        for chunk in batch.chunks:
            model = chunk.sequence.request.model
            if model != self.base_model:
                adapters.add(model)
                rows += chunk.tokens
        seconds = self.base.seconds(batch) + self.cost.seconds(len(adapters), rows)
        for load in batch.loads:
            seconds += self.cold_load if load.cold else self.load
        return seconds

    def adapter_seconds(self, decodes: Iterable[EngineSequence]) -> float:
        adapters, rows = self._adapters(decodes)
        return self.cost.seconds(len(adapters), rows)

    def _adapters(self, decodes: Iterable[EngineSequence]) -> tuple[set[str], int]:
        models = [sequence.request.model for sequence in decodes if sequence.request.model != self.base_model]
        return set(models), len(models)

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        return replace(self, base=self.base.vary(scores))


@dataclass(eq=False)
class ScaledStepTime(WrappedStepTime):
    """All step times of another model times a factor, at one value of its unknowns."""

    base: StepTime
    factor: float

    def seconds(self, batch: Batch) -> float:
        return self.factor * self.base.seconds(batch)

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return self._scaled(self.base.decode_seconds(decodes, kv, longest, steps))

    def group_seconds(self, batch: GroupBatch) -> float:
        return self.factor * self.base.group_seconds(batch)

    def group_decode_seconds(self, runs: Sequence[tuple[int, int, int]], steps: int) -> list[float]:
        return self._scaled(self.base.group_decode_seconds(runs, steps))

    def stage_seconds(self, batch: Batch, shares: Sequence[float]) -> list[float]:
        return self._scaled(self.base.stage_seconds(batch, shares))

    def send_seconds(self, tokens: int) -> float | None:
        seconds = self.base.send_seconds(tokens)
        return None if seconds is None else self.factor * seconds

    def chunk_table(self) -> ChunkTable | None:
        table = self.base.chunk_table()
        return None if table is None else (table[0], self._scaled(table[1]))

    def unknowns(self) -> tuple[Unknown, ...]:
        return ()

    def _scaled(self, durations: list[float]) -> list[float]:
        return [self.factor * seconds for seconds in durations]


class PartitionedStepTime(ScaledStepTime):
    """Steps on an equal part of a device's compute units and bandwidth, as MIG and MPS give them out.

    Every step takes `factor` times as long: an upper bound, since the host's overhead would not grow.
    """

    def unknowns(self) -> tuple[Unknown, ...]:
        return self.base.unknowns()

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        return PartitionedStepTime(self.base.vary(scores), self.factor)
