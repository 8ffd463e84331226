"""Source `linear`: step times on a line over the size of a batch, AFD's α/β lines for a whole colocated engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import StepTime, Unknown
from schedulers.batches import Batch, DraftedSteps

COEFFICIENTS = {
    "overhead": "seconds of every step",
    "per_token": "seconds a row",
    "per_kv_token": "seconds a cached token of a decode",
    "per_prefill_kv_token": "seconds a cached token of a prompt token",
}


@dataclass(eq=False)
class LinearStepTime(StepTime):
    """t = β + α_token · (prompt tokens + decodes' tokens) + α_kv · KV tokens read: `overhead` is β, seconds of a step.

    `per_prefill_kv_token`: seconds a cached token that one prompt token attends to; makes long prompts quadratic.
    """

    overhead: float
    per_token: float
    per_kv_token: float = 0.0
    per_prefill_kv_token: float = 0.0
    spread: float | None = field(default=None, kw_only=True)

    def seconds(self, batch: Batch) -> float:
        duration = self.overhead + self.per_token * batch.decode_tokens + self.per_kv_token * batch.decode_kv
        if batch.chunks:
            duration += self.per_token * batch.prefill_tokens
            if self.per_prefill_kv_token:
                duration += self.per_prefill_kv_token * attended(batch)
        return duration

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        fixed, slope = self.decode_line(decodes)
        return [fixed + slope * tokens for tokens in range(kv, kv + decodes * steps, decodes)]

    def drafted_seconds(self, steps: DraftedSteps) -> list[float]:
        fixed, per_row, per_kv = self.overhead, self.per_token, self.per_kv_token
        return [fixed + per_row * rows + per_kv * kv for rows, kv in zip(steps.rows, steps.kv_tokens, strict=True)]

    def decode_line(self, decodes: int) -> tuple[float, float]:
        return self.overhead + self.per_token * decodes, self.per_kv_token

    def unknowns(self) -> tuple[Unknown, ...]:
        """Coefficients above 0, where their spread is stated."""
        if self.spread is None:
            return ()
        return tuple(
            Unknown(name, about, "stated", self.spread, "steps of the engine")
            for name, about in COEFFICIENTS.items()
            if getattr(self, name)
        )

    def vary(self, scores: Mapping[str, float]) -> LinearStepTime:
        factors = self.factors(scores)
        return LinearStepTime(*(getattr(self, name) * factors.get(name, 1.0) for name in COEFFICIENTS))


def attended(batch: Batch) -> float:
    """Cached tokens that a batch's prompt tokens attend to, summed over prompt tokens; causal within a chunk."""
    return sum(chunk.tokens * (chunk.context + 0.5 * (chunk.tokens + 1)) for chunk in batch.chunks)


@register
class LinearSpec(SourceSpec):
    """Coefficients of a line, stated in the scenario; `spread`: relative uncertainty of each, None: unknown."""

    source: Literal["linear"]
    overhead: NonNegativeFloat
    per_token: NonNegativeFloat = 0.0
    per_kv_token: NonNegativeFloat = 0.0
    per_prefill_kv_token: NonNegativeFloat = 0.0
    spread: PositiveFloat | None = None

    def build(self, base: Path) -> LinearStepTime:
        return LinearStepTime(*(getattr(self, name) for name in COEFFICIENTS), spread=self.spread)

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "note": "coefficients stated in the scenario"}
