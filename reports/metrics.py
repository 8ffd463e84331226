"""Definitions of all metrics: functions of plain arrays, with one entry for each request or step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import NormalDist

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

    Ties count in order of ids. Tokens of requests in flight are not counted: a few per cent low for short runs.
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


def jain_index(values: Floats) -> float:
    """Jain's index of fairness, (Σx)² / (n Σx²): 1 if all are equal, 1/n if one has everything."""
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


PERCENTILES = (50, 90, 95, 99)
"""Percentiles of every reported latency."""


def quantiles(values: Floats, shares: Floats) -> Floats:
    """Quantiles, linear between order statistics, as of `numpy.quantile`, which imports masked arrays first."""
    ordered = np.sort(values)
    ranks = shares * (len(values) - 1)
    low = np.floor(ranks).astype(np.intp)
    below, above = ordered[low], ordered[np.minimum(low + 1, len(values) - 1)]
    rise, share = above - below, ranks - low
    return np.where(share < 0.5, below + rise * share, above - rise * (1 - share))


def spread(values: Floats, percentiles: Sequence[float] = PERCENTILES) -> dict[str, float] | None:
    """Mean and percentiles (linear between order statistics); None for an empty array."""
    if not len(values):
        return None
    quantities = {"mean": float(values.mean())}
    for q, value in zip(percentiles, quantiles(values, np.array(percentiles) / 100).tolist(), strict=True):
        quantities[f"p{q:g}"] = value
    return quantities


def weighted_spread(
    values: Floats, weights: Integers, percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float] | None:
    """The `spread` of an array that repeats each value by its whole weight, computed without making that array."""
    positive = weights > 0
    values, weights = values[positive], weights[positive]
    if not len(values):
        return None
    order = np.argsort(values)
    values, through = values[order], np.cumsum(weights[order])
    count = int(through[-1])
    quantities = {"mean": float((values * weights[order]).sum() / count)}
    for q in percentiles:
        rank = q / 100 * (count - 1)
        low, high = math.floor(rank), math.ceil(rank)
        below, above = values[np.searchsorted(through, (low, high), side="right")]
        quantities[f"p{q:g}"] = float(below + (above - below) * (rank - low))
    return quantities


Parts = Callable[[], Iterable[tuple[Floats, Integers]]]
"""Gives the parts of an array of values and of their whole weights, the same at each call."""


def weighted_spread_of_parts(parts: Parts) -> dict[str, float] | None:
    """The `weighted_spread` of values from 0 on that come in parts and need not fit into memory together.

    It does not depend on the parts: of each order statistic 16 more bits are found in each pass over them.
    """
    count = sum(int(weights.sum()) for _, weights in parts())
    if not count:
        return None
    total = exact_sum(values * weights for values, weights in parts())
    ranks = {q: q / 100 * (count - 1) for q in PERCENTILES}
    places = sorted({rounded(rank) for rank in ranks.values() for rounded in (math.floor, math.ceil)})
    value = dict(zip(places, _order_statistics(parts, places), strict=True))
    quantities = {"mean": total / count}
    for q, rank in ranks.items():
        below, above = value[math.floor(rank)], value[math.ceil(rank)]
        quantities[f"p{q}"] = float(below + (above - below) * (rank - math.floor(rank)))
    return quantities


def exact_sum(parts: Iterable[Floats]) -> float:
    """The sum of finite numbers that come in parts, rounded once."""
    return math.fsum(chain.from_iterable(part.tolist() for part in parts))


_DIGIT = 16
"""Bits of a number that a pass of `_order_statistics` finds."""


def _order_statistics(parts: Parts, ranks: list[int]) -> list[float]:
    """The values of these ranks, from 0, in the order of all values, which from 0 on is that of their bits."""
    leading, remaining = [0] * len(ranks), list(ranks)  # the bits found, and the rank among the values that have them
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts = {bits: np.zeros(1 << _DIGIT) for bits in leading}
        for values, weights in parts():
            numbers = (np.abs(values).view(np.int64)) >> shift
            for bits, count in counts.items():
                digits = numbers - (bits << _DIGIT)
                inside = (digits >= 0) & (digits < 1 << _DIGIT)
                count += np.bincount(digits[inside], weights[inside], 1 << _DIGIT)
        for index, bits in enumerate(leading):
            through = np.cumsum(counts[bits])
            digit = int(np.searchsorted(through, remaining[index], side="right"))
            remaining[index] -= int(through[digit - 1]) if digit else 0
            leading[index] = (bits << _DIGIT) + digit
    return np.array(leading, dtype=np.int64).view(np.float64).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half-width of its confidence interval; `plain` is the mean before the control was applied."""

    mean: float
    half_width: float
    plain: float


def student_quantile(confidence: float, degrees: int) -> float:
    """Two-sided quantile of Student's t, by its expansion about the normal (error below 1 % from 4 degrees on)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, start=1))


def controlled_mean(batches: Floats, control: Floats, control_mean: float, confidence: float = 0.95) -> Estimate:
    """Mean of batch means, (n,) with n ≥ 10, corrected by the deviation of a control with known mean in the batches.

    A least-squares line of `batches` on `control` is read off at `control_mean`. Sampling noise and the rest of a
    start-up transient, as far as the control explains them, drop out. Batches that are still correlated widen the
    interval (`_worth`).
    """
    count = len(batches)
    plain, centre = float(batches.mean()), float(control.mean())
    variation = float(((control - centre) ** 2).sum())
    negligible = 1e-18 * max(abs(centre), 1.0) ** 2 * count
    slope = float(((control - centre) * (batches - plain)).sum()) / variation if variation > negligible else 0.0
    residuals = batches - plain - slope * (control - centre)
    leverage = (centre - control_mean) ** 2 / variation if variation > negligible else 0.0
    inflation, degrees = _worth(residuals, fitted=2)
    variance = float((residuals**2).sum()) / (count - 2) * (1 / count + leverage) * inflation
    half_width = student_quantile(confidence, degrees) * math.sqrt(variance)
    return Estimate(plain - slope * (centre - control_mean), half_width, plain)


def ratio_of_means(numerator: Floats, denominator: Floats, confidence: float = 0.95) -> Estimate:
    """Σ numerator / Σ denominator over batches, with the interval of the delta method."""
    count = len(numerator)
    ratio = float(numerator.sum() / denominator.sum())
    residuals = (numerator - ratio * denominator) / float(denominator.mean())
    inflation, degrees = _worth(residuals, fitted=1)
    variance = float((residuals**2).sum()) / (count - 1) / count * inflation
    return Estimate(ratio, student_quantile(confidence, degrees) * math.sqrt(variance), ratio)


def _worth(residuals: Floats, fitted: int) -> tuple[float, int]:
    """The factor by which correlation inflates the variance of a mean, and the remaining degrees of freedom.

    Residuals are a first-order autoregression, whose ρ from few batches is low by about (1 + 3ρ)/n; n batches are then
    worth n (1 − ρ)/(1 + ρ) independent ones, less the `fitted` parameters.
    """
    count, power = len(residuals), float((residuals**2).sum())
    if power <= 0:
        return 1.0, count - fitted
    rho = max(float((residuals[1:] * residuals[:-1]).sum()) / power, 0.0)
    rho = min(rho + (1 + 3 * rho) / count, 0.9)
    inflation = (1 + rho) / (1 - rho)
    return inflation, max(int(count / inflation) - fitted, 4)


@dataclass(slots=True)
class Transfers:
    """Messages from some roles to others: how many, the bytes of their tensors, and seconds on the link together."""

    messages: int = 0
    size: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count a message."""
        self.messages += 1
        self.size += size
        self.seconds += seconds


@dataclass(frozen=True)
class BundleTimes:
    """The times of one run, seconds since its start: by completed request in their order, and by step of a microbatch.

    `attention`, `ffn`: busy and elapsed seconds of each instance, (instances, 2), and messages between them.
    """

    ids: Integers
    tokens: Integers
    first_token: Floats
    finish: Floats
    step_ends: Floats
    step_tokens: Integers
    attention: Floats
    ffn: Floats
    attention_to_ffn: Transfers = field(default_factory=Transfers)
    ffn_to_attention: Transfers = field(default_factory=Transfers)


@dataclass(frozen=True, slots=True)
class BundleMetrics:
    """The metrics of one run. Times in seconds, throughput in tokens per second and instance.

    `throughput`: eq. 21; `_generated`: with the tokens of requests in flight; `_full`: of all steps, for slots full to
    the end. `tpot`: eq. 22; `tpot_gaps`: per gap; None without one. `idle_*`: eq. 23, over each instance's own time.
    """

    throughput: float
    throughput_generated: float
    throughput_full: float
    tpot: float
    tpot_gaps: float | None
    idle_attention: float
    idle_ffn: float
    total_time: float
    requests: int
    steps: int
    attention_to_ffn: Transfers
    ffn_to_attention: Transfers


def bundle_metrics(times: BundleTimes) -> BundleMetrics:
    instances = len(times.attention) + len(times.ffn)
    stable = stable_throughput(times.tokens, times.finish)
    generated = int(times.step_tokens[times.step_ends <= stable.time].sum())
    return BundleMetrics(
        throughput=stable.per_instance(instances),
        throughput_generated=generated / stable.time / instances,
        throughput_full=float(times.step_tokens.sum() / times.step_ends[-1]) / instances,
        tpot=tpot_paper(times.first_token, times.finish, times.tokens),
        tpot_gaps=tpot(times.first_token, times.finish, times.tokens),
        idle_attention=_idle(times.attention),
        idle_ffn=_idle(times.ffn),
        total_time=float(times.finish[-1]),
        requests=len(times.tokens),
        steps=len(times.step_ends),
        attention_to_ffn=times.attention_to_ffn,
        ffn_to_attention=times.ffn_to_attention,
    )


def _idle(busy_and_elapsed: Floats) -> float:
    busy, elapsed = busy_and_elapsed.sum(axis=0).tolist()
    return idle_ratio(busy, 1, elapsed)
