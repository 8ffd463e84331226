"""Scenario files of AFD bundles: `kind: afd-bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from latency_models.strict import Strict, checked
from twin.scenarios.overrides import Settings, apply
from twin.scenarios.workload import WorkloadSpec


class LineSpec(Strict):
    """A latency line t = alpha·x + beta; what is left out stays as calibrated."""

    alpha: float | None = Field(default=None, ge=0)
    beta: float | None = Field(default=None, ge=0)


class LatencySpec(Strict):
    """What-if changes to a calibration, for a whole decode step and in its own units."""

    attention: LineSpec = LineSpec()
    ffn: LineSpec = LineSpec()
    communication: LineSpec = LineSpec()


class RooflineSpec(Strict):
    """A calibration derived from a hardware and a model file (AFD appendix B) in place of a measured one."""

    hardware: str
    model: str
    deployment: dict[str, Any] = Field(default_factory=dict)


class AfdScenario(Strict):
    """One AFD bundle and what it serves.

    Attributes:
        calibration: a built-in name, a file (from the scenario's folder), or a roofline to derive one from.
        batch_size: B, requests of one attention instance in one microbatch.
        microbatches: m in flight.
        requests_per_instance: N, requests to complete per attention instance (with replay: the whole trace is played).
        layers: passes through attention and FFN that one decode step is cut into, for per-layer pipelining. 1 treats
            the step as a single pass.
        refill: who takes a vacated slot, and where.
        start: `fresh` fills empty slots with new requests at once, as the paper does; `stationary` with requests caught
            in mid-life.
        fast_forward: one event a microbatch step in place of one a state; the same records, sooner.
        ratio: A/F ratios to sweep when the command line names none.
    """

    schema_: Literal["twin.scenario/1"] = Field(alias="schema")
    kind: Literal["afd-bundle"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    seed: int = Field(default=0, ge=0)
    calibration: str | RooflineSpec
    latency: LatencySpec = LatencySpec()
    batch_size: PositiveInt
    microbatches: PositiveInt = 2
    requests_per_instance: PositiveInt = 10_000
    layers: PositiveInt = 1
    refill: Literal["fcfs", "least_loaded"] = "fcfs"
    start: Literal["fresh", "stationary"] = "fresh"
    fast_forward: bool = True
    ratio: str = "1:32"
    workload: WorkloadSpec


def check_scenario(document: dict[str, Any], settings: Settings, path: Path) -> AfdScenario:
    """The document with `settings` applied, checked.

    Raises:
        BadInput: naming the file, the field, the value and what was expected.
    """
    return checked(AfdScenario, apply(document, settings), path)
