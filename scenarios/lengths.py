"""Distributions of the lengths of requests in a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from latency_models.io.config_io import Strict
from scenarios.limits import Tokens
from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput
from workloads.lengths import Fixed, Geometric, Lengths, LogNormal, Uniform


class FixedLengths(Strict):
    """The same length for every request, tokens."""

    distribution: Literal["fixed"]
    mean: Tokens

    def build(self) -> Lengths:
        return Fixed(self.mean)


class GeometricLengths(Strict):
    """Geometric lengths on {1, 2, …} with the given mean, tokens."""

    distribution: Literal["geometric"]
    mean: float = Field(ge=1, le=MAX_TOKENS)

    def build(self) -> Lengths:
        return Geometric(self.mean)


class LogNormalLengths(Strict):
    """Log-normal lengths with the given mean (tokens) and coefficient of variation."""

    distribution: Literal["lognormal"]
    mean: float = Field(ge=1, le=MAX_TOKENS)
    cv: float = Field(default=1.0, ge=1e-6, le=100)

    def build(self) -> Lengths:
        return LogNormal(self.mean, self.cv)


class UniformLengths(Strict):
    """Whole lengths from `low` to `high`, both included, tokens."""

    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _in_order(self) -> UniformLengths:
        if self.high < self.low:
            raise BadInput(f"expected at least low ({self.low})", field="high", value=self.high)
        return self

    def build(self) -> Lengths:
        return Uniform(self.low, self.high)


LengthSpec = Annotated[
    FixedLengths | GeometricLengths | LogNormalLengths | UniformLengths, Field(discriminator="distribution")
]
