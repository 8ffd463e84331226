"""One point of a sweep: the simulation of a bundle at one ratio, compared with theory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reports.records.run_directory import write_columns
from scenarios.afd import Topology
from twin.afd.bundle import Bundle, BundleConfig, BundleRecords, Supply, step_table
from twin.afd.measure import Measurement, measure, request_times
from twin.afd.plan import BundlePlan
from twin.afd.steady import SteadyState, steady_state
from twin.theory.gaps import decompose

MISSING = 0.005
STEADY_PRECISION = 0.005


@dataclass(frozen=True)
class BundleRun:
    """A finished run: its plan, records and metrics."""

    config: BundleConfig
    supply: Supply
    records: BundleRecords
    measured: Measurement


def simulate(plan: BundlePlan, topology: Topology) -> BundleRun:
    """Run the bundle of `plan` at one ratio, and once more for its steady state if the run did not reach it."""
    config, supply = plan.config(topology), plan.supply(topology)
    records = Bundle(config, supply).run()
    fresh = plan.scenario.start == "fresh"
    measured = measure(config, supply, records, plan.slot_load, plan.warm_up if fresh else 0, plan.period)
    if plan.closed_loop and plan.period == 1:
        measured = replace(measured, steady=_settled(plan, topology, measured.steady))
    return BundleRun(config, supply, records, measured)


def _settled(plan: BundlePlan, topology: Topology, first: SteadyState | None) -> SteadyState | None:
    """The steady state, from a run that was in it.

    A run that starts with empty caches suffices if, in the middle of the steps after the warm-up, all but `MISSING` of
    the load can be present. Otherwise another run follows, which starts with requests of random ages: twice as long,
    and 8 times if that leaves the interval wider than `STEADY_PRECISION`.
    """
    scenario = plan.scenario
    run_steps = scenario.requests_per_instance * plan.lengths.mean_decode / scenario.microbatches / scenario.batch_size
    missing = plan.lengths.load_beyond(int(plan.warm_up + run_steps) // 2) / plan.slot_load
    if scenario.start == "stationary" or (first is not None and missing < MISSING):
        return first
    config = plan.config(topology)
    completions = scenario.requests_per_instance * topology.attention_instances
    settled = None
    for stream, longer in enumerate((2, 8), start=1):
        supply = plan.closed_supply(topology, longer * completions, stationary=True, stream=stream)
        records = Bundle(config, supply).run()
        settled = steady_state(config, supply, records, step_table(records), slot_load=plan.slot_load, warm_up=0)
        if settled is not None and settled.relative_half_width < STEADY_PRECISION:
            break
    return settled


def describe(plan: BundlePlan, topology: Topology, measured: Measurement) -> dict[str, Any]:
    """The point's entry in the document `twin.sweep/1`. Barrier-aware theory is for full slots under FCFS only."""
    ratio, instances = float(topology.ratio), topology.attention_instances
    steady = measured.steady
    rates = {
        "": measured.throughput,
        "_generated": measured.throughput_generated,
        "_steady": None if steady is None else steady.throughput,
        "_steady_plain": None if steady is None else steady.plain,
        "_theory": plan.paper.throughput(ratio),
        "_barrier": plan.cycle.throughput(ratio, instances) if plan.closed_loop else None,
    }
    return {
        "ratio": ratio,
        "topology": str(topology),
        "attention_instances": instances,
        "ffn_instances": topology.ffn_instances,
        "cards": plan.cards.of(topology),
        **{f"throughput_per_instance{name}": rate for name, rate in rates.items()},
        "throughput_ci": None if steady is None else list(steady.interval),
        **_per_card(plan, topology, rates),
        **_memory(plan, measured),
        "tpot": measured.tpot,
        "tpot_between_tokens": measured.tpot_gaps,
        "idle_attention": measured.idle_attention,
        "idle_ffn": measured.idle_ffn,
        "regime": plan.paper.regime_at(ratio),
        "gaps": _gaps(plan, ratio, instances, measured),
        "state_shares": measured.state_shares,
        "requests": measured.requests,
        "steps": measured.steps,
        "mean_token_load": measured.mean_token_load,
        "simulated_time": measured.total_time,
        "seed": plan.seed(topology),
    }


def _per_card(plan: BundlePlan, topology: Topology, rates: dict[str, float | None]) -> dict[str, float | None]:
    scale = (topology.attention_instances + topology.ffn_instances) / plan.cards.of(topology)
    by_name = {name: rates[name] for name in ("", "_steady", "_theory", "_barrier")}
    return {f"throughput_per_card{name}": None if rate is None else rate * scale for name, rate in by_name.items()}


def _memory(plan: BundlePlan, measured: Measurement) -> dict[str, float | bool | None]:
    """Bytes on an attention card, and whether they fit: by the stationary law, or as simulated (open arrivals)."""
    check = plan.memory_check
    if check is None:
        return {"attention_memory": None, "fits": None}
    size = check.attention_bytes(check.tokens if plan.closed_loop else measured.largest_token_load)
    return {"attention_memory": size, "fits": size <= check.memory.limit and check.ffn_fits}


def _gaps(plan: BundlePlan, ratio: float, instances: int, measured: Measurement) -> dict[str, float] | None:
    """The gaps to theory; None without a theory (open arrivals) or without a steady state."""
    if not plan.closed_loop or measured.steady is None:
        return None
    return decompose(
        plan.paper,
        plan.cycle,
        ratio,
        instances,
        steady=measured.steady.throughput,
        generated=measured.throughput_generated,
        measured=measured.throughput,
    )


def run_point(plan: BundlePlan, topology: Topology, requests_to: Path | None = None) -> dict[str, Any]:
    """Simulate and describe one point, in a worker process. `requests_to`: file for one row of each request."""
    run = simulate(plan, topology)
    if requests_to is not None:
        write_columns(requests_to, request_columns(run))
    return describe(plan, topology, run.measured)


def request_columns(run: BundleRun) -> dict[str, Any]:
    """One entry a finished request, in order of completion; times in the calibration's unit."""
    times = request_times(run.config, run.supply, run.records, step_table(run.records))
    return {
        "request": times.ids,
        "microbatch": times.microbatch,
        "prefill_tokens": run.supply.prefill[times.ids],
        "decode_tokens": run.supply.decode[times.ids],
        "arrival": np.zeros(len(times.ids)) if run.supply.arrivals is None else run.supply.arrivals[times.ids],
        "seated": times.seated,
        "first_token": times.first_token,
        "finish": times.finish,
    }
