"""Step times of an engine that speculates with a draft model: its own steps, and the draft model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from latency_models.step_time import StepTime, StepTimeModel
from latency_models.unknowns import Unknown
from schedulers.batches import Batch

if TYPE_CHECKING:
    from latency_models.origin import MeasuredDeployment

DRAFT = "draft."
"""Begins the names of the draft model's unknowns."""


class DraftedStepTime(StepTimeModel):
    """A step of the target model, then as many passes of the draft model as the longest draft has tokens.

    The first pass of the draft model computes what the step computed: prompt chunks, and a token of each decode. Each
    further pass computes one token of each decode. Steps in which nothing is drafted have the draft model's pass over
    prompts alone, which fills its cache.

    Args:
        target, draft: step times of the two models.
    """

    def __init__(self, target: StepTime, draft: StepTime) -> None:
        self.target, self.draft = target, draft

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        seconds = self.target.seconds(batch)
        drafted = max(batch.draft_tokens, default=0)
        if not (drafted or batch.chunks):
            return seconds
        decodes = batch.decodes if drafted else ()
        kv, longest = (batch.decode_kv, batch.longest_decode) if drafted else (0, 0)
        seconds += self.draft.seconds(type(batch)(batch.chunks, decodes, kv, longest))
        if drafted > 1 and decodes:
            n = batch.n_decodes
            seconds += sum(self.draft.decode_seconds(n, kv + n, longest + 1, drafted - 1))
        return seconds

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """See `StepTime.decode_seconds`: steps that draft nothing."""
        return self.target.decode_seconds(decodes, kv, longest, steps)

    def unknowns(self) -> tuple[Unknown, ...]:
        """See `StepTime.unknowns`: those of both models."""
        drafts = (replace(each, name=DRAFT + each.name) for each in self.draft.unknowns())
        return (*self.target.unknowns(), *drafts)

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        """See `StepTime.vary`."""
        own = {name: score for name, score in scores.items() if not name.startswith(DRAFT)}
        drafts = {name.removeprefix(DRAFT): score for name, score in scores.items() if name.startswith(DRAFT)}
        return DraftedStepTime(self.target.vary(own), self.draft.vary(drafts))

    def outside(self) -> Mapping[str, float]:
        """See `StepTime.outside`."""
        return {**self.target.outside(), **{DRAFT + axis: value for axis, value in self.draft.outside().items()}}

    def measured_deployment(self) -> MeasuredDeployment | None:
        """See `StepTime.measured_deployment`: the target model's."""
        return self.target.measured_deployment()

    def kv_tokens(self, gpu_memory_utilization: float, max_num_seqs: int) -> float | None:
        """See `StepTime.kv_tokens`. The draft model's weights and cache are not counted."""
        return self.target.kv_tokens(gpu_memory_utilization, max_num_seqs)
