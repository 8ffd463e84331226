"""One point of a sweep: a bundle simulated at one ratio, its metrics (AFD eq. 21-23), and the gaps to theory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports import metrics
from reports.metrics import Estimate, controlled_mean, ratio_of_means
from reports.run_directory import write_columns
from scenarios.afd import Topology
from twin.afd.bundle import Bundle, BundleConfig, BundleRecords, FloatArray, Step, Supply, step_table
from twin.afd.plan import BundlePlan
from twin.theory.paper import decompose

BATCHES = 32
FEWEST_BATCHES = 8


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Throughput per instance in the steady state, tokens per time unit, with its 95 % interval.

    In a closed loop the exactly known mean token load is a control variate; `plain` does without.
    """

    throughput: float
    interval: tuple[float, float]
    plain: float
    steps: int

    @property
    def relative_half_width(self) -> float:
        """Half the interval, as a share of the throughput."""
        return (self.interval[1] - self.interval[0]) / 2 / self.throughput


def steady_state(
    config: BundleConfig,
    supply: Supply,
    records: BundleRecords,
    steps: FloatArray,
    *,
    slot_load: float,
    warm_up: int,
    period: int = 1,
) -> SteadyState | None:
    """Estimate the steady state; None if the run is too short for enough batches.

    At most half of the steps are left out as `warm_up`; batches are whole periods. `slot_load` is the control.
    """
    # Steps with every slot full; with open arrivals, steps before the last request came and the bundle began to drain.
    until = records.full_until if supply.arrivals is None else float(supply.arrivals[-1])
    usable = len(steps) if until is None else int(np.searchsorted(steps[:, Step.END], until, side="right"))
    batches = _cut(steps[:usable], config.microbatches, warm_up, period)
    if batches is None:
        return None
    size, duration, load, requests = batches
    if supply.arrivals is not None:
        rate = ratio_of_means(requests, duration)
    else:
        time = controlled_mean(duration, load / config.attention_instances, slot_load * config.batch_size)
        tokens = config.batch_size * config.attention_instances
        # From time per step to tokens per time; the relative width of the interval carries over.
        rate = Estimate(tokens / time.mean, tokens * time.half_width / time.mean**2, tokens / time.plain)
    instances = config.attention_instances + config.ffn_instances
    interval = (rate.mean - rate.half_width) / instances, (rate.mean + rate.half_width) / instances
    return SteadyState(rate.mean / instances, interval, rate.plain / instances, size * len(duration))


def _cut(
    steps: FloatArray, microbatches: int, warm_up: int, period: int
) -> tuple[int, FloatArray, FloatArray, FloatArray] | None:
    """Leave out the warm-up and cut the rest into up to 32 batches of whole rounds (and whole periods).

    Returns:
        The steps of a batch, and means over them, shape (batches,): durations, loads and requests.
    """
    unit = microbatches * period
    begin = -(-min(warm_up * microbatches, len(steps) // 2) // unit) * unit
    units = (len(steps) - 1 - begin) // unit
    count = min(BATCHES, units)
    if count < FEWEST_BATCHES:
        return None
    size = units // count * unit
    # Durations run from end to end, so the step before the window opens it.
    edges = begin + np.arange(count + 1) * size
    inside = steps[begin + 1 : edges[-1] + 1].reshape(count, size, -1)
    load, requests = (inside[:, :, column].mean(axis=1) for column in (Step.LOAD_TOTAL, Step.REQUESTS))
    return size, np.diff(steps[edges, Step.END]) / size, load, requests


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times at which each finished request was admitted, gave its first token and finished, in order of completion."""

    ids: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    seated: FloatArray
    first_token: FloatArray
    finish: FloatArray


@dataclass(frozen=True, slots=True)
class Measurement:
    """The metrics of one run of a bundle. Times in the calibration's unit, throughput in tokens per unit and instance.

    `mean_token_load`: of one instance and microbatch; `largest_token_load`: a bound of an instance's tokens.
    """

    throughput: float
    throughput_generated: float
    tpot: float
    tpot_gaps: float | None
    idle_attention: float
    idle_ffn: float
    steady: SteadyState | None
    total_time: float
    mean_token_load: float
    largest_token_load: float
    steps: int
    requests: int
    state_shares: dict[str, float]


def request_times(config: BundleConfig, supply: Supply, records: BundleRecords, steps: FloatArray) -> RequestTimes:
    """Read the times of the first `supply.completions` requests to finish off the steps of their microbatches."""
    seats = np.array(records.seated, dtype=np.int64)
    decode = supply.decode
    owner, first_step = seats % config.microbatches, seats // config.microbatches
    ready, first, finish = (np.full(len(seats), np.inf) for _ in range(3))
    for index in range(config.microbatches):
        own_steps = steps[steps[:, Step.MICROBATCH] == index]
        finished = np.flatnonzero((seats >= 0) & (owner == index) & (first_step + decode <= len(own_steps)))
        ready[finished] = own_steps[first_step[finished], Step.READY]
        first[finished] = own_steps[first_step[finished], Step.END]
        finish[finished] = own_steps[first_step[finished] + decode[finished] - 1, Step.END]
    count = len(decode) if supply.completions is None else supply.completions
    ids = np.argsort(finish, kind="stable")[:count]
    return RequestTimes(ids, owner[ids], ready[ids], first[ids], finish[ids])


def measure(
    config: BundleConfig, supply: Supply, records: BundleRecords, slot_load: float, warm_up: int, period: int = 1
) -> Measurement:
    """Compute all metrics of one run; the steady state leaves `warm_up` steps of each microbatch out.

    `slot_load`: exact mean of an always-full slot, the control. `period`: steps after which loads repeat exactly.
    """
    steps = step_table(records)
    times = request_times(config, supply, records, steps)
    decode = supply.decode[times.ids]
    instances = config.attention_instances + config.ffn_instances
    stable = metrics.stable_throughput(decode, times.finish)
    total = float(steps[-1, Step.END])
    generated = float(steps[steps[:, Step.END] <= stable.time, Step.REQUESTS].sum())
    busy = _busy(config, steps)
    steady = steady_state(config, supply, records, steps, slot_load=slot_load, warm_up=warm_up, period=period)
    return Measurement(
        throughput=stable.per_instance(instances),
        throughput_generated=generated / stable.time / instances,
        tpot=metrics.tpot_paper(times.first_token, times.finish, decode),
        tpot_gaps=metrics.tpot(times.first_token, times.finish, decode),
        idle_attention=metrics.idle_ratio(busy["instances"], config.attention_instances, total),
        idle_ffn=metrics.idle_ratio(busy["ffn"], 1, total),
        steady=steady,
        total_time=total,
        mean_token_load=float(steps[:, Step.LOAD_TOTAL].mean()) / config.attention_instances,
        largest_token_load=largest_token_load(steps, config.microbatches),
        steps=len(steps),
        requests=len(decode),
        state_shares=_state_shares(steps, busy),
    )


def largest_token_load(steps: FloatArray, microbatches: int) -> float:
    """An upper bound of an instance's tokens: the sum of the largest loads in each microbatch, maybe of others."""
    by_begin = steps[np.argsort(steps[:, Step.READY], kind="stable")]
    total = np.zeros(len(by_begin))
    for index in range(microbatches):
        is_own = by_begin[:, Step.MICROBATCH] == index
        latest = np.maximum.accumulate(np.where(is_own, np.arange(len(by_begin)), -1))
        total += np.where(latest >= 0, by_begin[latest, Step.LOAD_MAX], 0.0)
    return float(total.max())


def _busy(config: BundleConfig, steps: FloatArray) -> dict[str, float]:
    """Time at work in the steps that ended: attention phases, the instances' own attention, and the FFN.

    A phase lasts as long as the slowest instance's attention in lockstep, else as the mean of those at work.
    """
    (alpha_a, beta_a), (alpha_f, beta_f) = config.latency.attention, config.latency.ffn
    total, at_work = steps[:, Step.LOAD_TOTAL], steps[:, Step.AT_WORK]
    load = steps[:, Step.LOAD_MAX] if config.advance == "lockstep" else total / at_work
    phases = (alpha_a * load + beta_a).sum()
    instances = alpha_a * total.sum() + beta_a * at_work.sum()
    ffn = (alpha_f * steps[:, Step.REQUESTS] / config.ffn_instances + beta_f).sum()
    times = {"attention": phases, "instances": instances, "ffn": ffn}
    return {name: config.layers * float(time) for name, time in times.items()}


def _state_shares(steps: FloatArray, busy: dict[str, float]) -> dict[str, float]:
    lived = float((steps[:, Step.END] - steps[:, Step.READY]).sum())
    states = {
        "attention": busy["attention"],
        "a_to_f": 0.0,
        "wait_for_ffn": float(steps[:, Step.FFN_WAIT].sum()),
        "ffn": busy["ffn"],
        "f_to_a": 0.0,
        "wait_for_attention": float(steps[:, Step.ATTENTION_WAIT].sum()),
    }
    transfers = lived - sum(states.values())
    states["a_to_f"] = states["f_to_a"] = transfers / 2
    return {name: time / lived for name, time in states.items()}


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
    scale = (instances + topology.ffn_instances) / plan.cards.of(topology)
    rates: dict[str, Any] = {
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
        **{
            f"throughput_per_card{name}": None if rates[name] is None else rates[name] * scale
            for name in ("", "_steady", "_theory", "_barrier")
        },
        **_memory(plan, measured),
        "tpot": measured.tpot,
        "tpot_between_tokens": measured.tpot_gaps,
        "idle_attention": measured.idle_attention,
        "idle_ffn": measured.idle_ffn,
        "regime": plan.paper.regime_at(ratio),
        "gaps": _gaps(plan, ratio, instances, measured),
        **{name: getattr(measured, name) for name in ("state_shares", "requests", "steps", "mean_token_load")},
        "simulated_time": measured.total_time,
        "seed": plan.seed(topology),
    }


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
    rates = measured.steady.throughput, measured.throughput_generated, measured.throughput
    return decompose(plan.paper, plan.cycle, ratio, instances, *rates)


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
