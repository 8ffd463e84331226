"""Definitions of all metrics: functions of plain arrays, with one entry for each request or step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StableThroughput:
    """The parts of eq. 21: tokens of the first completions, and the time of the last of them."""

    tokens: int
    time: float

    def per_instance(self, instances: int) -> float:
        """Output tokens per time unit and instance."""
        return self.tokens / self.time / instances


def stable_throughput(decode_tokens: Integers, finish: Floats, fraction: float = 0.8) -> StableThroughput:
    """Throughput of AFD eq. 21: output tokens of the first ⌈fraction·N⌉ completed requests, over their time.

    Requests that complete at the same instant count in order of their ids. Tokens of requests still in flight are not
    counted, which is the paper's choice and makes the figure a few per cent low for short runs.
    """
    count = math.ceil(fraction * len(finish))
    first = np.argsort(finish, kind="stable")[:count]
    return StableThroughput(int(decode_tokens[first].sum()), float(finish[first[-1]]))


def tpot_paper(first_token: Floats, finish: Floats, decode_tokens: Integers) -> float:
    """TPOT of AFD eq. 22: the mean over requests of (completion − first token) / D. One token takes no time."""
    return float(np.mean((finish - first_token) / decode_tokens))


def tpot(first_token: Floats, finish: Floats, decode_tokens: Integers) -> float | None:
    """TPOT of serving benchmarks: the mean of (completion − first token) / (D − 1) over requests with D > 1."""
    several = decode_tokens > 1
    if not several.any():
        return None
    gaps = decode_tokens[several] - 1
    return float(np.mean((finish[several] - first_token[several]) / gaps))


def idle_ratio(busy: float, instances: int, total: float) -> float:
    """Idle ratio of AFD eq. 23: the idle share of `total` time of `instances` devices, busy for `busy` together."""
    return 1.0 - busy / (instances * total)


PERCENTILES = (50, 90, 95, 99)
"""Percentiles of every reported latency."""


def spread(values: Floats) -> dict[str, float] | None:
    """Mean and percentiles (linear between order statistics, like numpy's); None for an empty array."""
    if not len(values):
        return None
    found = {"mean": float(values.mean())}
    for q, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
        found[f"p{q}"] = float(value)
    return found


def weighted_spread(values: Floats, weights: Integers) -> dict[str, float] | None:
    """The `spread` of an array that repeats each value by its whole weight, computed without making that array."""
    kept = weights > 0
    values, weights = values[kept], weights[kept]
    if not len(values):
        return None
    order = np.argsort(values)
    values, through = values[order], np.cumsum(weights[order])
    count = int(through[-1])
    found = {"mean": float((values * weights[order]).sum() / count)}
    for q in PERCENTILES:
        rank = q / 100 * (count - 1)
        low, high = math.floor(rank), math.ceil(rank)
        below, above = values[np.searchsorted(through, (low, high), side="right")]
        found[f"p{q}"] = float(below + (above - below) * (rank - low))
    return found
