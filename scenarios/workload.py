"""The `workload` section of an AFD scenario: lengths and arrivals, synthetic or from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.lengths import LengthSpec
from scenarios.trace import TraceSpec
from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson, Replay
from workloads.errors import BadInput
from workloads.pairs import Independent, LengthPairs
from workloads.traces import Trace


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
