"""The plan of a sweep's point, made from a checked scenario: lengths, latencies, theory, supply."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from latency_models.calibration import Calibration
from latency_models.calibration_loader import load_calibration
from latency_models.deployment.roofline import derive
from latency_models.stages import PassLatency
from scenarios.afd import AfdScenario, LineSpec, RooflineSpec, Topology
from schedulers.bundle_slots import REFILL_POLICIES
from twin.afd.bundle import BundleConfig, IntArray, Supply
from twin.afd.instances import DEPLOYMENT, CardMemory, Cards, card_memory, instance_cards, load_deployed
from twin.afd.memory import MemoryCheck
from twin.theory.cycle import CycleModel
from twin.theory.load import load_phases
from twin.theory.paper import PaperModel
from workloads.errors import BadInput
from workloads.pairs import LengthPairs
from workloads.traces import Trace


@dataclass(frozen=True)
class BundlePlan:
    """One configuration, ready to be run at any ratio; `latency` is of a whole decode step, `memory` of a card."""

    scenario: AfdScenario
    calibration: Calibration
    latency: PassLatency
    lengths: LengthPairs
    trace: Trace | None
    cards: Cards
    memory: CardMemory | None

    @property
    def closed_loop(self) -> bool:
        """True if every slot is kept full."""
        return self.scenario.workload.arrivals.process == "closed_loop"

    @cached_property
    def slot_load(self) -> float:
        """The exact mean token load θ of an always-full slot."""
        return self.lengths.renewal_load()

    @cached_property
    def paper(self) -> PaperModel:
        """The paper's model (AFD section 4) with this workload's means and N."""
        scenario = self.scenario
        return PaperModel(
            self.latency,
            scenario.batch_size,
            self.lengths.mean_prefill,
            self.lengths.mean_decode,
            scenario.requests_per_instance,
        )

    @cached_property
    def cycle(self) -> CycleModel:
        """The barrier- and pipeline-aware model of the same bundle."""
        scenario = self.scenario
        phases = load_phases(self.lengths, scenario.batch_size, in_step=scenario.start == "fresh")
        return CycleModel(self.latency, scenario.batch_size, scenario.microbatches, phases, scenario.advance)

    @cached_property
    def memory_check(self) -> MemoryCheck | None:
        """The check of the bundle's memory; None if the memory is not known."""
        if self.memory is None:
            return None
        scenario, in_step = self.scenario, self.scenario.start == "fresh"
        shape = scenario.batch_size, scenario.microbatches
        return MemoryCheck(self.memory, self.cards, self.lengths, *shape, in_step, self.closed_loop)

    @property
    def warm_up(self) -> int:
        """Steps of a microbatch after which a fresh start has no influence: four mean ages of a resident request."""
        return math.ceil(4 * (self.slot_load - self.resident_prefill))

    @property
    def resident_prefill(self) -> float:
        """Mean prefill of the request in a slot at a random step, E[PD]/E[D]: long answers are seen more often."""
        lengths = self.lengths
        return lengths.mean_prefill + lengths.covariance / lengths.mean_decode

    @property
    def period(self) -> int:
        """Steps after which the loads repeat exactly, or 1."""
        constant = self.lengths.constant_decode
        return constant if constant is not None and self.scenario.start == "fresh" else 1

    def config(self, topology: Topology) -> BundleConfig:
        scenario, step = self.scenario, self.latency
        parts = [
            (alpha / scenario.layers, beta / scenario.layers)
            for alpha, beta in (step.attention, step.ffn, step.communication)
        ]
        return BundleConfig(
            topology.attention_instances,
            topology.ffn_instances,
            scenario.batch_size,
            PassLatency(*parts),
            scenario.microbatches,
            scenario.layers,
            REFILL_POLICIES[scenario.refill],
            scenario.advance,
            scenario.ffn_order,
            scenario.fast_forward,
        )

    def seed(self, topology: Topology) -> int:
        """The seed of this point, by workload and shape alone: a what-if question gets the same requests."""
        shaping = {"seed", "batch_size", "microbatches", "requests_per_instance", "start", "workload"}
        shape = self.scenario.model_dump(mode="json", include=shaping, exclude={"workload": {"trace": {"path"}}})
        text = json.dumps([shape, self.trace_digest, str(topology.ratio)], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    @cached_property
    def trace_digest(self) -> str | None:
        """A digest of the trace's content, independent of its path."""
        trace = self.trace
        if trace is None:
            return None
        content = trace.prefill_tokens.tobytes() + trace.decode_tokens.tobytes()
        return hashlib.sha256(content + (b"" if trace.arrivals is None else trace.arrivals.tobytes())).hexdigest()

    def supply(self, topology: Topology) -> Supply:
        scenario = self.scenario
        requests = scenario.requests_per_instance * topology.attention_instances
        if self.closed_loop:
            return self.closed_supply(topology, requests, stationary=scenario.start == "stationary")
        rng = np.random.default_rng(self.seed(topology))
        process = scenario.workload.arrival_process(self.trace, topology.attention_instances)
        if scenario.workload.arrivals.process == "replay":
            assert self.trace is not None
            prefill, decode = self.trace.prefill_tokens, self.trace.decode_tokens
        else:
            prefill, decode = self.lengths.sample(rng, requests)
        arrivals = process.times(rng, len(decode))
        return Supply(prefill, decode, arrivals, len(decode))

    def closed_supply(self, topology: Topology, completions: int, *, stationary: bool, stream: int = 0) -> Supply:
        """Requests for a closed loop that stays full until `completions` have finished; `stream` numbers its draws."""
        rng = np.random.default_rng([self.seed(topology), stream])
        scenario = self.scenario
        in_flight = scenario.microbatches * scenario.batch_size * topology.attention_instances
        prefill, decode = self.lengths.sample(rng, completions + in_flight)
        if stationary:
            prefill[:in_flight], decode[:in_flight] = mid_life(self.lengths, rng, in_flight)
        return Supply(prefill, decode, None, completions)


def make_plan(scenario: AfdScenario, base: Path, trace: Trace | None) -> BundlePlan:
    """Load the files of a scenario; relative paths start from `base`, the scenario's folder."""
    spec = scenario.calibration
    if isinstance(spec, RooflineSpec):
        deployed = load_deployed(spec, base)
        calibration = derive(deployed.hardware, deployed.model, deployed.deployment, DEPLOYMENT)
    else:
        deployed, calibration = None, load_calibration(spec, base)
    cards, memory = instance_cards(scenario.instances, deployed), card_memory(scenario.instances, deployed)
    arrivals = scenario.workload.arrivals.process
    if arrivals == "replay" and calibration.time_unit != "seconds":
        unit = calibration.time_unit
        raise BadInput(
            f"replay expects a calibration in seconds, as a trace's arrivals are; {calibration.name} is in {unit}",
            field="workload.arrivals.process",
            value=arrivals,
        )
    latency, lengths = _step_latency(calibration, scenario), scenario.workload.lengths(trace)
    return BundlePlan(scenario, calibration, latency, lengths, trace, cards, memory)


def _step_latency(calibration: Calibration, scenario: AfdScenario) -> PassLatency:
    """α and β of a whole decode step, with the scenario's what-if changes."""
    changes = scenario.latency
    parts = [
        _changed(calibration.step_line("attention"), changes.attention),
        _changed(calibration.step_line("ffn"), changes.ffn),
        _changed(calibration.step_line("communication"), changes.communication),
    ]
    if parts[1][0] <= 0:
        raise BadInput("expected an FFN time that grows with its requests (alpha above 0)", field="latency.ffn.alpha")
    return PassLatency(*parts)


def _changed(line: tuple[float, float], spec: LineSpec) -> tuple[float, float]:
    alpha, beta = line
    return (alpha if spec.alpha is None else spec.alpha, beta if spec.beta is None else spec.beta)


def mid_life(lengths: LengthPairs, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
    """Requests in slots at a random step: long answers are more frequent, each at a uniform age."""
    prefill, decode = lengths.sample_resident(rng, count)
    age = rng.integers(0, decode)
    return prefill + age, decode - age
