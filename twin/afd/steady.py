"""The steady state of a run: the steps after the start has lost its influence, cut into batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reports.statistics import Estimate, controlled_mean, ratio_of_means
from twin.afd.bundle import END, LOAD_TOTAL, REQUESTS, BundleConfig, BundleRecords, FloatArray, Supply

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


@dataclass(frozen=True, slots=True)
class Batches:
    """Consecutive batches of `size` microbatch steps; arrays of shape (batches,), means over a batch's steps."""

    size: int
    duration: FloatArray
    load: FloatArray
    tokens: FloatArray


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
    usable = len(steps) if until is None else int(np.searchsorted(steps[:, END], until, side="right"))
    batches = _cut(steps[:usable], config.microbatches, warm_up, period)
    if batches is None:
        return None
    if supply.arrivals is not None:
        rate = ratio_of_means(batches.tokens, batches.duration)
        return _state(config, rate, batches)
    control = batches.load / config.attention_instances
    time = controlled_mean(batches.duration, control, slot_load * config.batch_size)
    tokens = config.batch_size * config.attention_instances
    # From time per step to tokens per time; the relative width of the interval carries over.
    rate = Estimate(tokens / time.mean, tokens * time.half_width / time.mean**2, tokens / time.plain)
    return _state(config, rate, batches)


def _state(config: BundleConfig, rate: Estimate, batches: Batches) -> SteadyState:
    instances = config.attention_instances + config.ffn_instances
    low, high = rate.mean - rate.half_width, rate.mean + rate.half_width
    steps = batches.size * len(batches.duration)
    interval = (low / instances, high / instances)
    return SteadyState(rate.mean / instances, interval, rate.plain / instances, steps)


def _cut(steps: FloatArray, microbatches: int, warm_up: int, period: int) -> Batches | None:
    """Leave out the warm-up and cut the rest into up to 32 batches of whole rounds (and whole periods)."""
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
    return Batches(
        size,
        np.diff(steps[edges, END]) / size,
        inside[:, :, LOAD_TOTAL].mean(axis=1),
        inside[:, :, REQUESTS].mean(axis=1),
    )
