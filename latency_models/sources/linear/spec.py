"""The scenario section of `source: linear`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from latency_models.sources.linear.step_time import LinearStepTime
from latency_models.sources.specification import SourceSpec, register


@register
class LinearSpec(SourceSpec):
    """Coefficients of a line, stated in the scenario.

    Attributes:
        overhead: seconds of every step.
        per_token: seconds a row (a prompt token or a decode).
        per_kv_token: seconds a cached token that a decode attends to.
        per_prefill_kv_token: seconds a cached token that a prompt token attends to.
        spread: relative uncertainty of each coefficient, from which `--draws` draws. Without it the error is unknown.
    """

    source: Literal["linear"]
    overhead: NonNegativeFloat
    per_token: NonNegativeFloat = 0.0
    per_kv_token: NonNegativeFloat = 0.0
    per_prefill_kv_token: NonNegativeFloat = 0.0
    spread: PositiveFloat | None = None

    def build(self, base: Path) -> LinearStepTime:
        return LinearStepTime(
            self.overhead, self.per_token, self.per_kv_token, self.per_prefill_kv_token, spread=self.spread
        )

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "note": "coefficients stated in the scenario"}
