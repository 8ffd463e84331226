"""The plan of a bundle, made from a checked scenario, and the summary of its theory and its simulated points."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.calibration import Calibration
from latency_models.calibration_loader import load_calibration
from latency_models.deployment.hardware import derive
from latency_models.stages import PassLatency
from scenarios.afd import AfdScenario, RooflineSpec, Topology
from schedulers.bundle_slots import REFILL_POLICIES
from twin.afd.bundle import BundleConfig, IntArray, Supply
from twin.afd.memory import DEPLOYMENT, CardMemory, Cards, MemoryCheck, card_memory, instance_cards, load_deployed
from twin.theory.cycle import CycleModel, load_phases
from twin.theory.paper import PaperModel
from workloads.errors import BadInput
from workloads.pairs import JointEmpirical, LengthPairs
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
        scenario, means = self.scenario, (self.lengths.mean_prefill, self.lengths.mean_decode)
        return PaperModel(self.latency, scenario.batch_size, *means, scenario.requests_per_instance)

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
        lines = (step.attention, step.ffn, step.communication)
        parts = [(alpha / scenario.layers, beta / scenario.layers) for alpha, beta in lines]
        return BundleConfig(
            topology.attention_instances, topology.ffn_instances, scenario.batch_size, PassLatency(*parts),
            scenario.microbatches, scenario.layers, REFILL_POLICIES[scenario.refill], scenario.advance,
            scenario.ffn_order, scenario.fast_forward,
        )  # fmt: skip

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
        unit = f"{calibration.name} is in {calibration.time_unit}"
        expected = f"replay expects a calibration in seconds, as a trace's arrivals are; {unit}"
        raise BadInput(expected, field="workload.arrivals.process", value=arrivals)
    latency, lengths = _step_latency(calibration, scenario), scenario.workload.lengths(trace)
    return BundlePlan(scenario, calibration, latency, lengths, trace, cards, memory)


def _step_latency(calibration: Calibration, scenario: AfdScenario) -> PassLatency:
    """α and β of a whole decode step, with the scenario's what-if changes."""
    lines = []
    for name in ("attention", "ffn", "communication"):
        (alpha, beta), change = calibration.step_line(name), getattr(scenario.latency, name)
        lines.append((alpha if change.alpha is None else change.alpha, beta if change.beta is None else change.beta))
    if lines[1][0] <= 0:
        raise BadInput("expected an FFN time that grows with its requests (alpha above 0)", field="latency.ffn.alpha")
    return PassLatency(*lines)


def mid_life(lengths: LengthPairs, rng: np.random.Generator, count: int) -> tuple[IntArray, IntArray]:
    """Requests in slots at a random step: long answers are more frequent, each at a uniform age."""
    prefill, decode = lengths.sample_resident(rng, count)
    age = rng.integers(0, decode)
    return prefill + age, decode - age


RATIOS = ("r_star", "regime", "r_attention", "r_communication", "r_critical", "r_peak")
CURVE_POINTS = 96
TRACE_BLOCKS = 40
SEARCHED = 0.25, 256.0
"""Range of ratios of the search for the barrier-aware optimum; per card wider by √(c_F/c_A), like r_peak."""


def theory_summary(plan: BundlePlan) -> dict[str, Any]:
    """The results of eq. 12-20, the same with the exact load of the lengths, and the barrier-aware optimum."""
    paper = plan.paper
    limit = replace(paper, requests=None)
    best = plan.cycle.best_ratio(*SEARCHED)
    lengths, interval = plan.lengths, None
    if isinstance(lengths, JointEmpirical) and len(lengths) >= TRACE_BLOCKS:  # requests near in time are alike
        interval = lengths.renewal_load_interval(block=len(lengths) // TRACE_BLOCKS)
    return {
        **{name: getattr(paper, name) for name in RATIOS},
        "throughput_at_r_star": paper.throughput_at_optimum,
        "mean_token_load": paper.mean_load,
        **{name: getattr(paper, name) for name in ("horizon_steps", "t_attention", "t_communication")},
        "t_ffn_at_r_star": paper.t_ffn(paper.r_star),
        "mean_token_load_limit": limit.mean_load,
        "r_star_limit": limit.r_star,
        "mean_prefill": plan.lengths.mean_prefill,
        "mean_decode": plan.lengths.mean_decode,
        "slot_load_renewal": plan.slot_load,
        "slot_load_renewal_interval": interval and list(interval),
        "mean_token_load_renewal": plan.slot_load * paper.batch_size,
        "r_star_renewal": paper.r_star_at(plan.slot_load * paper.batch_size),
        "r_star_renewal_interval": interval and [paper.r_star_at(load * paper.batch_size) for load in interval],
        "r_star_barrier": best,
        "throughput_at_r_star_barrier": plan.cycle.throughput(best),
        **_theory_per_card(plan, best),
    }


def _theory_per_card(plan: BundlePlan, best_per_instance: float) -> dict[str, Any]:
    """The optima of both theories, and the throughput there, with cards counted in place of instances."""
    cards = plan.cards.attention, plan.cards.ffn
    published = plan.paper.r_star_per_card(*cards)
    best = best_per_instance
    if plan.cards.attention != plan.cards.ffn:
        share = cards[1] / cards[0]
        low, high = SEARCHED[0] * min(1, math.sqrt(share)), SEARCHED[1] * max(1, math.sqrt(share))
        best = plan.cycle.best_ratio(low, high, attention_cards=cards[0], ffn_cards=cards[1])
    return {
        "r_star_per_card": published,
        "regime_per_card": plan.paper.regime_per_card(*cards),
        "throughput_per_card_at_r_star": plan.paper.throughput_per_card(published, *cards),
        "r_star_barrier_per_card": best,
        "throughput_per_card_at_r_star_barrier": plan.cycle.throughput_per_card(best, *cards),
    }


def simulation_summary(points: Sequence[dict[str, Any]], theory: dict[str, Any]) -> dict[str, Any]:
    """The peak of the simulated points, the crossing of their idle ratios, and the cost of the gaps between ratios.

    `best_*` uses the steady state, or eq. 21 without one; None if no point fits in memory. `best_range`: ratios that
    the 95 % intervals cannot tell apart. `discreteness`: loss of the published curve between the swept ratios.
    """
    if not points:
        return {}
    feasible = [point for point in points if point["fits"] is not False]
    by_paper = max(points, key=lambda point: point["throughput_per_instance"])
    best = _best(feasible, "throughput_per_instance")
    best_per_card = _best(feasible, "throughput_per_card")
    curve = max(point["throughput_per_instance_theory"] for point in points)
    return {
        **best,
        "best_over_r_star": best["best_ratio"] / theory["r_star"] if feasible else None,
        "best_ratio_eq_21": by_paper["ratio"],
        **{f"{key}_per_card": value for key, value in best_per_card.items()},
        "idle_crossing": idle_crossing(points),
        "discreteness": curve / theory["throughput_at_r_star"] - 1,
    }


def _best(points: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The point with the highest steady `metric`, and the ratios that its 95 % interval cannot tell from it."""
    if not points:
        return dict.fromkeys(("best_ratio", "best_topology", "best_range", "best_throughput"))
    steady = [point for point in points if point[f"{metric}_steady"] is not None]
    if not steady:
        best = max(points, key=lambda point: point[metric])
        throughput, alike = best[metric], [best["ratio"]]
    else:
        best = max(steady, key=lambda point: point[f"{metric}_steady"])
        throughput, floor = best[f"{metric}_steady"], _interval_end(best, metric, 0)
        alike = [point["ratio"] for point in steady if _interval_end(point, metric, 1) >= floor or point is best]
    return {
        "best_ratio": best["ratio"],
        "best_topology": best["topology"],
        "best_range": [min(alike), max(alike)],
        "best_throughput": throughput,
    }


def _interval_end(point: dict[str, Any], metric: str, end: int) -> float:
    """Lower (0) or upper (1) end of a steady point's interval, which is kept per instance, in the metric's unit."""
    ratio: float = point["throughput_ci"][end] / point["throughput_per_instance_steady"]
    return ratio * float(point[f"{metric}_steady"])


def idle_crossing(points: Sequence[dict[str, Any]]) -> float | None:
    """The ratio at which attention and FFN idle alike, interpolated in log r; None if they do not cross in the
    sweep."""
    ordered = sorted(points, key=lambda point: point["ratio"])
    for left, right in itertools.pairwise(ordered):
        before = left["idle_attention"] - left["idle_ffn"]
        after = right["idle_attention"] - right["idle_ffn"]
        if before <= 0 < after:
            share = before / (before - after)
            return float(math.exp((1 - share) * math.log(left["ratio"]) + share * math.log(right["ratio"])))
    return None


def curves(plan: BundlePlan, ratios: Sequence[float]) -> dict[str, list[float]]:
    """The theory's curves over the swept range, for figures."""
    low, high = min(ratios), max(ratios)
    if low == high:
        low, high = low / 2, high * 2
    grid = [float(ratio) for ratio in np.geomspace(low, high, CURVE_POINTS)]
    paper, cycle = plan.paper, plan.cycle
    steps = [cycle.step_time(ratio) for ratio in grid]
    batch = plan.scenario.batch_size
    return {
        "ratio": grid,
        "theory": [paper.throughput(ratio) for ratio in grid],
        "barrier": [ratio * batch / ((ratio + 1) * step) for ratio, step in zip(grid, steps, strict=True)],
        "t_attention": [paper.t_attention] * len(grid),
        "t_communication": [paper.t_communication] * len(grid),
        "t_ffn": [paper.t_ffn(ratio) for ratio in grid],
        "t_step": steps,
    }
