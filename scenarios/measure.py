"""The measurements of a serving scenario, and a real run for comparison."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator

from latency_models.io.config_io import Strict
from latency_models.io.paths import FilePath
from scenarios.goals import refuse_milliseconds


class MeasureSpec(Strict):
    """The measurements.

    Attributes:
        start: begin of a request's TTFT and E2E: `submitted` by the client, or `queued` by the engine (vLLM's
            `queued_ts`: an engine notices arrivals between steps).
        after, before: only requests that end between these times count, seconds. Default: all.
        prefix_cache: compare prefix caches with the best that caches of their size could do.
        slo: goals in seconds for goodput: a request counts when it meets all that are given.
    """

    start: Literal["submitted", "queued"] = "submitted"
    after: NonNegativeFloat = 0.0
    before: PositiveFloat | None = None
    prefix_cache: bool = False
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)

    @field_validator("slo")
    @classmethod
    def _in_seconds(cls, slo: dict[str, float]) -> dict[str, float]:
        for name, limit in slo.items():
            refuse_milliseconds(name, limit, f"slo.{name}")
        return slo


class MeasuredSpec(Strict):
    """A real run to set beside the prediction: JSON lines with times of each request. Nothing is fitted to it."""

    requests: FilePath
    timeseries: FilePath | None = None
