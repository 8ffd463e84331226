"""Scenarios of `twin validate` with `layout: afd`: a bundle, live and simulated, at several ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from latency_models.message_link import MessageLink
from scenarios.afd import WorkloadSpec, ratio_text
from scenarios.limits import Microbatches, PositiveTokens, Repeats, Requests, Slots
from scenarios.overrides import Settings
from scenarios.policies import registered
from scenarios.ratios import Topology, parse_ratios
from scenarios.reading import ScenarioFile, check
from scenarios.validation import LiveModelSpec
from schedulers.bundle_slots import REFILL_POLICIES
from workloads.errors import BadInput


class MessageLinkSpec(Strict):
    """The link between two roles, which direct execution and the simulation both assume.

    Attributes:
        latency: seconds. bandwidth: bytes per second.
        overhead: CPU seconds of sending and of receiving a message, beside packing and unpacking it.
    """

    latency: NonNegativeFloat = 0.0
    bandwidth: PositiveFloat = 1e9
    overhead: NonNegativeFloat = 0.0

    def build(self) -> MessageLink:
        return MessageLink(self.latency, self.bandwidth, self.overhead)


class BundleSystemSpec(Strict):
    """A bundle with one FFN instance.

    Attributes:
        batch_size: B, requests of one attention instance in one microbatch. microbatches: m in flight.
        block_size: tokens of a KV block. refill: the policy by which requests get slots.
    """

    layout: Literal["afd"]
    batch_size: Slots
    microbatches: Microbatches = 2
    block_size: PositiveTokens = 16
    refill: Annotated[str, registered(REFILL_POLICIES)] = "fcfs"
    link: MessageLinkSpec = Field(default_factory=MessageLinkSpec)


class BundleProfilingSpec(Strict):
    """The profiling of the roles, at each ratio, in turns with the live runs.

    Attributes:
        max_prompt_tokens, max_output_tokens: of a request; lengths are spread evenly in their logarithm.
    """

    max_prompt_tokens: PositiveTokens
    max_output_tokens: PositiveTokens


class BundleValidationScenario(ScenarioFile):
    """A bundle that is run live, with its slots full, and simulated with the same requests.

    Attributes:
        workload: lengths, in a closed loop.
        ratio: r of rA-1F, whole numbers.
        requests: of each attention instance, to complete in each repeat, beside those that are left in the slots then.
            So runs at all ratios have about as many steps.
        repeats: of each ratio, with other requests each time.
        clock: direct execution, the only one for a bundle.
    """

    kind: Literal["validation"]
    model: LiveModelSpec
    workload: WorkloadSpec
    system: BundleSystemSpec
    requests: Requests
    ratio: Annotated[str, BeforeValidator(ratio_text)] = "1:8"
    repeats: Repeats = Field(default=3, ge=2)
    profiling: BundleProfilingSpec
    clock: Literal["direct"] = "direct"

    @model_validator(mode="after")
    def _runnable(self) -> BundleValidationScenario:
        if self.workload.arrivals.process != "closed_loop":
            raise BadInput("expected closed_loop", field="workload.arrivals.process")
        if self.model.threads != 1:
            raise BadInput("expected 1: the CPU time of one thread is the clock", field="model.threads")
        if any(topology.ffn_instances > 1 for topology in self.topologies):
            raise BadInput("expected whole ratios: one FFN instance", field="ratio", value=self.ratio)
        return self

    def completions(self, instances: int) -> int:
        """Requests that a bundle with so many attention instances completes in each repeat."""
        return self.requests * instances

    @property
    def topologies(self) -> list[Topology]:
        """The bundles to run."""
        return parse_ratios(self.ratio)


def check_bundle_validation(document: dict[str, Any], settings: Settings, path: Path) -> BundleValidationScenario:
    """Apply `settings` to a document, and check it."""
    return check(BundleValidationScenario, document, settings, path)
