"""Computes the paper's metrics (eq. 21-23) and the steady state from a bundle's records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reports import metrics
from twin.afd.bundle import (
    AT_WORK,
    ATTENTION_WAIT,
    END,
    FFN_WAIT,
    LOAD_MAX,
    LOAD_TOTAL,
    MICROBATCH,
    READY,
    REQUESTS,
    BundleConfig,
    BundleRecords,
    FloatArray,
    Supply,
    step_table,
)
from twin.afd.steady import SteadyState, steady_state


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
        own_steps = steps[steps[:, MICROBATCH] == index]
        finished = np.flatnonzero((seats >= 0) & (owner == index) & (first_step + decode <= len(own_steps)))
        ready[finished] = own_steps[first_step[finished], READY]
        first[finished] = own_steps[first_step[finished], END]
        finish[finished] = own_steps[first_step[finished] + decode[finished] - 1, END]
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
    total = float(steps[-1, END])
    generated = float(steps[steps[:, END] <= stable.time, REQUESTS].sum())
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
        mean_token_load=float(steps[:, LOAD_TOTAL].mean()) / config.attention_instances,
        largest_token_load=largest_token_load(steps, config.microbatches),
        steps=len(steps),
        requests=len(decode),
        state_shares=_state_shares(steps, busy),
    )


def largest_token_load(steps: FloatArray, microbatches: int) -> float:
    """An upper bound of an instance's tokens: the sum of the largest loads in each microbatch, maybe of others."""
    by_begin = steps[np.argsort(steps[:, READY], kind="stable")]
    total = np.zeros(len(by_begin))
    for index in range(microbatches):
        is_own = by_begin[:, MICROBATCH] == index
        latest = np.maximum.accumulate(np.where(is_own, np.arange(len(by_begin)), -1))
        total += np.where(latest >= 0, by_begin[latest, LOAD_MAX], 0.0)
    return float(total.max())


def _busy(config: BundleConfig, steps: FloatArray) -> dict[str, float]:
    """Time at work in the steps that ended: attention phases, the instances' own attention, and the FFN.

    A phase lasts as long as the slowest instance's attention in lockstep, else as the mean of those at work.
    """
    (alpha_a, beta_a), (alpha_f, beta_f) = config.latency.attention, config.latency.ffn
    load = steps[:, LOAD_MAX] if config.advance == "lockstep" else steps[:, LOAD_TOTAL] / steps[:, AT_WORK]
    phases = (alpha_a * load + beta_a).sum()
    instances = alpha_a * steps[:, LOAD_TOTAL].sum() + beta_a * steps[:, AT_WORK].sum()
    ffn = (alpha_f * steps[:, REQUESTS] / config.ffn_instances + beta_f).sum()
    times = {"attention": phases, "instances": instances, "ffn": ffn}
    return {name: config.layers * float(time) for name, time in times.items()}


def _state_shares(steps: FloatArray, busy: dict[str, float]) -> dict[str, float]:
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
