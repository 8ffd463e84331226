"""From a bundle's records to the paper's metrics (eq. 21-23) and the steady state beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reports import metrics
from reports.statistics import Estimate, batch_mean, controlled_mean
from twin.afd.bundle import BundleConfig, BundleRecords, Supply

MICROBATCH, READY, END, ATTENTION_WAIT, FFN_WAIT, LOAD_MAX, LOAD_TOTAL, REQUESTS, AT_WORK = range(9)
BATCHES = 32

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When each request was seated, gave its first token and finished. Arrays over `ids`, those that did finish."""

    ids: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    seated: Floats
    first_token: Floats
    finish: Floats


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Throughput per instance while every slot is full and the start is forgotten.

    `throughput` uses the mean token load, known exactly, as a control variate; `plain` does not. `interval` is at 95 %.
    """

    throughput: float
    interval: tuple[float, float]
    plain: float
    steps: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run of a bundle showed. Times in the calibration's unit, throughput in tokens per unit and instance."""

    throughput: float
    throughput_generated: float
    tpot: float
    tpot_gaps: float | None
    idle_attention: float
    idle_ffn: float
    steady: SteadyState | None
    stable_time: float
    total_time: float
    mean_token_load: float
    steps: int
    requests: int
    state_shares: dict[str, float]


def request_times(config: BundleConfig, supply: Supply, records: BundleRecords) -> RequestTimes:
    """Read the times of the first `supply.completions` requests to finish off the steps of their microbatches."""
    steps = np.array(records.steps, dtype=np.float64)
    seats = np.array(records.seated, dtype=np.int64)
    decode = np.asarray(supply.decode, dtype=np.int64)
    owner, begun = seats % config.microbatches, seats // config.microbatches
    ready, first, finish = (np.full(len(seats), np.inf) for _ in range(3))
    for index in range(config.microbatches):
        own_steps = steps[steps[:, MICROBATCH] == index]
        done = np.flatnonzero((seats >= 0) & (owner == index) & (begun + decode <= len(own_steps)))
        ready[done] = own_steps[begun[done], READY]
        first[done] = own_steps[begun[done], END]
        finish[done] = own_steps[begun[done] + decode[done] - 1, END]
    count = len(decode) if supply.completions is None else supply.completions
    ids = np.sort(np.argsort(finish, kind="stable")[:count])
    return RequestTimes(ids, owner[ids], ready[ids], first[ids], finish[ids])


def measure(
    config: BundleConfig, supply: Supply, records: BundleRecords, slot_load: float, warm_up: int, period: int = 1
) -> Measurement:
    """Everything that is reported of one run.

    Args:
        slot_load: exact mean token load of an always-full slot (renewal-reward), the control of the steady state.
        warm_up: steps of each microbatch that the steady state leaves out.
        period: steps after which the loads repeat exactly (constant lengths), else 1; the window is whole periods.
    """
    steps = np.array(records.steps, dtype=np.float64)
    times = request_times(config, supply, records)
    decode = np.asarray(supply.decode, dtype=np.int64)[times.ids]
    instances = config.attention_instances + config.ffn_instances
    stable = metrics.stable_throughput(decode, times.finish)
    total = float(steps[-1, END])
    generated = float(steps[steps[:, END] <= stable.time, REQUESTS].sum())
    busy = _busy(config, steps)
    return Measurement(
        throughput=stable.per_instance(instances),
        throughput_generated=generated / stable.time / instances,
        tpot=metrics.tpot_paper(times.first_token, times.finish, decode),
        tpot_gaps=metrics.tpot(times.first_token, times.finish, decode),
        idle_attention=metrics.idle_ratio(busy["instances"], config.attention_instances, total),
        idle_ffn=metrics.idle_ratio(busy["ffn"], 1, total),
        steady=_steady_state(config, supply, records, steps, slot_load, warm_up, period),
        stable_time=stable.time,
        total_time=total,
        mean_token_load=float(steps[:, LOAD_TOTAL].mean()) / config.attention_instances,
        steps=len(steps),
        requests=len(decode),
        state_shares=_state_shares(steps, busy),
    )


def _steady_state(
    config: BundleConfig,
    supply: Supply,
    records: BundleRecords,
    steps: Floats,
    slot_load: float,
    warm_up: int,
    period: int,
) -> SteadyState | None:
    """None when the run is too short to hold a window, or when arrivals leave slots empty at random."""
    window = _window(config, records, steps, warm_up, period)
    if window is None:
        return None
    batch, duration, load, tokens = window
    instances = config.attention_instances + config.ffn_instances
    per_step = tokens.sum() / batch.sum()
    estimate: Estimate
    if supply.arrivals is None:
        estimate = controlled_mean(duration, load / config.attention_instances, slot_load * config.batch_size)
    else:
        estimate = batch_mean(duration)
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    rate = float(per_step) / instances
    return SteadyState(rate / estimate.mean, (rate / high, rate / low), rate / estimate.plain, int(batch.sum()))


def _window(
    config: BundleConfig, records: BundleRecords, steps: Floats, warm_up: int, period: int
) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Cut the full-slot stretch into batches: their steps, mean step duration, mean total load, and tokens."""
    m = config.microbatches
    until = records.full_until
    full = int(np.searchsorted(steps[:, END], np.inf if until is None else until, side="right"))
    begin = min(warm_up * m, full // 2)
    if period > 1:
        begin = -(-begin // (period * m)) * period * m
        count = min(BATCHES, (full - 1 - begin) // (period * m))
        size = (full - 1 - begin) // (period * m * max(count, 1)) * period * m
    else:
        count = BATCHES
        size = (full - 1 - begin) // (BATCHES * m) * m
    if size < 1 or count < (2 if period > 1 else BATCHES):
        return None
    # Durations run from end to end, so the step before the window opens it.
    edges = begin + np.arange(count + 1) * size
    cuts = [slice(low + 1, high + 1) for low, high in zip(edges[:-1], edges[1:], strict=True)]
    duration = np.diff(steps[edges, END]) / size
    load = np.array([steps[cut, LOAD_TOTAL].mean() for cut in cuts])
    tokens = np.array([steps[cut, REQUESTS].sum() for cut in cuts])
    return np.full(count, float(size)), duration, load, tokens


def _busy(config: BundleConfig, steps: Floats) -> dict[str, float]:
    """Time at work in the steps that ended: attention phases, the instances' own attention, and the FFN."""
    (alpha_a, beta_a), (alpha_f, beta_f) = config.latency.attention, config.latency.ffn
    phases = (alpha_a * steps[:, LOAD_MAX] + beta_a).sum()
    instances = alpha_a * steps[:, LOAD_TOTAL].sum() + beta_a * steps[:, AT_WORK].sum()
    ffn = (alpha_f * steps[:, REQUESTS] / config.ffn_instances + beta_f).sum()
    times = {"attention": phases, "instances": instances, "ffn": ffn}
    return {name: config.layers * float(time) for name, time in times.items()}


def _state_shares(steps: Floats, busy: dict[str, float]) -> dict[str, float]:
    """Where a microbatch spends its time: the six states of AFD 5.1, as shares of all microbatch time."""
    lived = float((steps[:, END] - steps[:, READY]).sum())
    states = {
        "attention": busy["attention"],
        "a_to_f": 0.0,
        "wait_for_ffn": float(steps[:, FFN_WAIT].sum()),
        "ffn": busy["ffn"],
        "f_to_a": 0.0,
        "wait_for_attention": float(steps[:, ATTENTION_WAIT].sum()),
    }
    transfers = lived - sum(states.values())
    states["a_to_f"] = states["f_to_a"] = transfers / 2
    return {name: time / lived for name, time in states.items()}
