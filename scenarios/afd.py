"""Scenario files of AFD bundles: `kind: afd-bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.io.config_io import Strict
from latency_models.io.paths import NAME_OR_FILE, NameOrFile
from scenarios.limits import Layers, Microbatches, Requests, Slots
from scenarios.overrides import Settings
from scenarios.plugins import Plugin
from scenarios.reading import check
from scenarios.registered import registered
from scenarios.workload import WorkloadSpec
from schedulers.bundle_slots import REFILL_POLICIES, Advance, FfnOrder


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
    """Cards and memory of one attention and one FFN instance.

    A calibration derived from hardware knows all of it but the utilization. For any other, one card an instance is
    assumed, and memory is checked where `memory` and `kv_bytes_per_token` are given.

    Attributes:
        attention_cards, ffn_cards: devices (GPUs, NPUs) of one instance.
        memory: bytes of one card.
        gpu_memory_utilization: share of it that weights and KV cache may take.
        kv_bytes_per_token: KV cache of one token over all layers, bytes, spread over the instance's cards.
        attention_weights, ffn_weights: bytes on one card.
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


class AfdScenario(Strict):
    """One AFD bundle and its workload.

    Attributes:
        calibration: a built-in name, a file (from the scenario's folder), or a roofline to derive one from.
        instances: cards of the instances and their memory.
        batch_size: B, requests of one attention instance in one microbatch.
        microbatches: m in flight.
        requests_per_instance: N, requests to complete per attention instance (with replay: the whole trace is played).
        layers: passes through attention and FFN that one decode step is cut into, for per-layer pipelining. 1 treats
            the step as a single pass.
        refill: the policy that assigns requests to vacated slots.
        start: `fresh` fills empty slots with new requests at once, as the paper does; `stationary` with requests
            of random ages.
        advance: `lockstep` moves all attention instances to their next microbatch when the slowest is done, as the
            paper's steps are synchronized; `independent` lets each go on by itself, so that only the FFN waits for all.
        ffn_order: with `independent`, whether the FFN takes microbatches in the order in which they set out
            (`in_order`) or whichever is complete (`first_ready`).
        fast_forward: one event a microbatch step in place of one a state; the same records, sooner.
        ratio: A/F ratios to sweep when the command line names none.
    """

    schema_: Literal["twin.scenario/1"] = Field(alias="schema")
    kind: Literal["afd-bundle"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    plugins: list[Plugin] = Field(default_factory=list)
    seed: int = Field(default=0, ge=0)
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
    """Apply `settings` to a document, and check it.

    Raises:
        BadInput: naming the file, the field, the value and what was expected.
    """
    return check(AfdScenario, document, settings, path)
