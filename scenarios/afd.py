"""Scenario files of AFD bundles, `kind: afd-bundle`, and A/F ratios as a user writes them: `1,2,4`, `1:32:4`, `7/2`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.files import NAME_OR_FILE, NameOrFile
from scenarios.fields import Layers, LengthSpec, Microbatches, Requests, Slots, registered
from scenarios.reading import ScenarioFile, Settings, check
from scenarios.requests import TraceSpec
from schedulers.bundle_slots import REFILL_POLICIES, Advance, FfnOrder
from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson, Replay
from workloads.errors import BadInput
from workloads.pairs import Independent, LengthPairs
from workloads.traces import Trace

MOST_INSTANCES = 4096
EXPECTED = "expected a ratio above 0 such as 8, 7/2 or 3.5, a range such as 1:32 or 1:32:4, or a list of these"


@dataclass(frozen=True, slots=True, order=True)
class Topology:
    """x attention and y FFN instances, in lowest terms: 7/2 is 7A-2F, r = 3.5."""

    ratio: Fraction

    @property
    def attention_instances(self) -> int:
        """The number x of attention instances."""
        return self.ratio.numerator

    @property
    def ffn_instances(self) -> int:
        """The number y of FFN instances."""
        return self.ratio.denominator

    def __str__(self) -> str:
        return f"{self.attention_instances}A-{self.ffn_instances}F"


def parse_ratios(text: str) -> list[Topology]:
    """Parse the ratios in `text`, each once, in the order given."""
    ratios: dict[Fraction, None] = {}
    for part in text.split(","):
        for ratio in _range(part.strip(), text):
            ratios.setdefault(ratio)
    return [Topology(ratio) for ratio in ratios]


def _range(part: str, text: str) -> list[Fraction]:
    ends = [_ratio(end, text) for end in part.split(":")]
    if len(ends) == 1:
        return ends
    if len(ends) > 3 or ends[1] < ends[0]:
        raise BadInput(EXPECTED, field="--ratio", value=text)
    step = ends[2] if len(ends) == 3 else Fraction(1)
    count = int((ends[1] - ends[0]) / step) + 1
    if count > MOST_INSTANCES:
        raise BadInput(f"expected at most {MOST_INSTANCES} ratios", field="--ratio", value=text)
    return [ends[0] + step * index for index in range(count)]


def _ratio(text: str, option: str) -> Fraction:
    try:
        ratio = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise BadInput(EXPECTED, field="--ratio", value=option) from None
    if ratio <= 0:
        raise BadInput(EXPECTED, field="--ratio", value=option)
    if max(ratio.numerator, ratio.denominator) > MOST_INSTANCES:
        raise BadInput(f"expected at most {MOST_INSTANCES} instances of a kind", field="--ratio", value=option)
    return ratio


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


class LineSpec(Strict):
    """A latency line t = alpha·x + beta; what is left out stays as calibrated."""

    alpha: float | None = Field(default=None, ge=0)
    beta: float | None = Field(default=None, ge=0)


class LatencySpec(Strict):
    """Changes to a calibration for what-if questions, for a whole decode step and in its own units."""

    attention: LineSpec = Field(default_factory=LineSpec)
    ffn: LineSpec = Field(default_factory=LineSpec)
    communication: LineSpec = Field(default_factory=LineSpec)


class RooflineSpec(Strict):
    """A calibration derived from a hardware and a model file (AFD appendix B) in place of a measured one."""

    hardware: NameOrFile
    model: NameOrFile
    deployment: dict[str, Any] = Field(default_factory=dict)


class InstancesSpec(Strict):
    """Cards and memory of one attention and one FFN instance; docs/reference/scenario-file.md has every field.

    A calibration derived from hardware knows all of it but the utilization. For any other, one card an instance is
    assumed, and memory is checked where `memory` and `kv_bytes_per_token` are given.
    """

    attention_cards: PositiveInt | None = None
    ffn_cards: PositiveInt | None = None
    memory: PositiveFloat | None = None
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    kv_bytes_per_token: PositiveFloat | None = None
    attention_weights: NonNegativeFloat | None = None
    ffn_weights: NonNegativeFloat | None = None


def ratio_text(value: Any) -> Any:
    """A ratio that YAML reads as a number, as text."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if number else value


class AfdScenario(ScenarioFile):
    """One AFD bundle and its workload; docs/reference/scenario-file.md describes every field."""

    kind: Literal["afd-bundle"]
    calibration: Annotated[str | RooflineSpec, NAME_OR_FILE]
    latency: LatencySpec = Field(default_factory=LatencySpec)
    instances: InstancesSpec = Field(default_factory=InstancesSpec)
    batch_size: Slots
    microbatches: Microbatches = 2
    requests_per_instance: Requests = 10_000
    layers: Layers = 1
    refill: Annotated[str, registered(REFILL_POLICIES)] = "fcfs"
    start: Literal["fresh", "stationary"] = "fresh"
    advance: Advance = "lockstep"
    ffn_order: FfnOrder = "in_order"
    fast_forward: bool = True
    ratio: Annotated[str, BeforeValidator(ratio_text)] = "1:32"
    workload: WorkloadSpec


def check_scenario(document: dict[str, Any], settings: Settings, path: Path) -> AfdScenario:
    """Apply `settings` to a document, and check it."""
    return check(AfdScenario, document, settings, path)
