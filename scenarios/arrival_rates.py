"""Rates of arrival that change over time: `profile` and `bursts` of `workload.arrivals`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from workloads.rates import Bursts, Profile


class ProfileSpec(Strict):
    """A rate that changes over time and repeats; only its shape counts, since `rate` is its mean.

    Attributes:
        points: [seconds, relative rate]; the time of the last one is the period. between: straight lines (`ramps`) or
            constant rates (`steps`) between them.
        swing, peak_at, period: in place of points, a sine wave between 1 - swing and 1 + swing; seconds.
        start: seconds into the profile at time 0, or `random`.
    """

    points: list[Annotated[list[float], Field(min_length=2, max_length=2)]] | None = Field(None, max_length=100_000)
    between: Literal["ramps", "steps"] = "ramps"
    swing: float | None = None
    peak_at: float = 50400.0
    period: PositiveFloat = 86400.0
    start: NonNegativeFloat | Literal["random"] = 0.0

    @model_validator(mode="after")
    def _one_shape(self) -> ProfileSpec:
        if (self.points is None) == (self.swing is None):
            raise ValueError("expected either points or swing")
        self.build()
        return self

    def build(self) -> Profile:
        """The profile."""
        if self.points is None:
            assert self.swing is not None
            return Profile.of_day(self.swing, self.peak_at, self.period)
        return Profile.of_points([(time, rate) for time, rate in self.points], self.between)


class BurstsSpec(Strict):
    """Times with `factor` times the rate of others, of `seconds` on average, beginning each `every` s on average."""

    factor: float
    seconds: float
    every: float

    @model_validator(mode="after")
    def _can_be(self) -> BurstsSpec:
        self.build()
        return self

    def build(self) -> Bursts:
        """The bursts."""
        return Bursts(self.factor, self.seconds, self.every)
