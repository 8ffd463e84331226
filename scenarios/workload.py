"""The `workload` section of a scenario: lengths and arrivals, synthetic or from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.paths import FilePath
from scenarios.limits import Tokens
from scenarios.registered import registered
from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson, Replay
from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput
from workloads.lengths import Fixed, Geometric, Lengths, LogNormal, Uniform
from workloads.pairs import Independent, LengthPairs
from workloads.traces import AUTO, TRACE_FORMATS, Trace, read_trace


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


class TraceSpec(Strict):
    """A recorded workload. `pairing` joint keeps each prompt with its answer, independent shuffles them."""

    path: FilePath | None = None
    format: Annotated[str, registered(TRACE_FORMATS, AUTO)] = AUTO
    pairing: Literal["joint", "independent"] = "joint"

    def read(self, base: Path) -> Trace:
        """The trace. Relative paths start from `base`.

        Raises:
            BadInput: no file is named, or it cannot be read in its format.
        """
        if self.path is None:
            raise BadInput("expected a trace file: give --trace FILE", field="workload.trace.path")
        return read_trace(base / self.path, self.format)


class ClosedLoopSpec(Strict):
    """A closed loop: a finished request is replaced at once, so that every slot stays full."""

    process: Literal["closed_loop"] = "closed_loop"


class PoissonSpec(Strict):
    """Open arrivals. `rate` is requests per time unit and attention instance."""

    process: Literal["poisson"]
    rate: PositiveFloat


class GammaSpec(Strict):
    """Open arrivals with gaps of the given coefficient of variation; `rate` as for Poisson."""

    process: Literal["gamma"]
    rate: PositiveFloat
    cv: PositiveFloat


class DeterministicSpec(Strict):
    """Open arrivals at even gaps; `rate` as for Poisson."""

    process: Literal["deterministic"]
    rate: PositiveFloat


class ReplaySpec(Strict):
    """The trace's own arrivals and order. `speed` 2 plays it twice as fast; times are seconds of the trace."""

    process: Literal["replay"]
    speed: PositiveFloat = 1.0


ArrivalSpec = Annotated[
    ClosedLoopSpec | PoissonSpec | GammaSpec | DeterministicSpec | ReplaySpec, Field(discriminator="process")
]


class WorkloadSpec(Strict):
    """Lengths from two distributions or from a trace, and the arrival process."""

    prefill: LengthSpec | None = None
    decode: LengthSpec | None = None
    trace: TraceSpec | None = None
    arrivals: ArrivalSpec = Field(default_factory=ClosedLoopSpec)

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSpec:
        synthetic = self.prefill is not None and self.decode is not None
        if self.trace is None and not synthetic:
            raise ValueError("expected both prefill and decode, or a trace")
        if self.trace is not None and (self.prefill is not None or self.decode is not None):
            raise ValueError("expected either a trace or prefill and decode, not both")
        if self.arrivals.process == "replay" and self.trace is None:
            raise ValueError("arrivals.process replay expects a trace")
        return self

    def read_trace(self, base: Path) -> Trace | None:
        """The trace, if there is one; relative paths start from `base`."""
        return None if self.trace is None else self.trace.read(base)

    def lengths(self, trace: Trace | None) -> LengthPairs:
        """The joint distribution of prefill and decode lengths."""
        if trace is not None and self.trace is not None:
            pairs = trace.pairs()
            return pairs if self.trace.pairing == "joint" else pairs.independent()
        assert self.prefill is not None
        assert self.decode is not None
        return Independent(self.prefill.build(), self.decode.build())

    def arrival_process(self, trace: Trace | None, attention_instances: int) -> Arrivals:
        """The arrival process of a whole bundle."""
        spec = self.arrivals
        match spec:
            case ClosedLoopSpec():
                return ClosedLoop()
            case PoissonSpec():
                return Poisson(spec.rate * attention_instances)
            case GammaSpec():
                return Gamma(spec.rate * attention_instances, spec.cv)
            case DeterministicSpec():
                return Deterministic(spec.rate * attention_instances)
            case ReplaySpec():
                assert trace is not None
                if trace.arrivals is None:
                    raise BadInput(
                        "replay expects a trace with arrival times", field="workload.arrivals.process", value="replay"
                    )
                return Replay(trace.arrivals / spec.speed)
