"""The token load of an attention instance whose slots are always full, and the cycle time of a bundle.

The load is of any length distribution, by renewal-reward: a request with prefill s and decode length D keeps its slot
for D steps, with loads s, s + 1, …, s + D − 1. Seen at a random step, a slot therefore carries θ = E[PD]/E[D] +
E[D(D − 1)]/(2 E[D]) tokens in the mean, and its whole distribution is known too. The B slots of an instance are
independent, so their sum has a known distribution, and the barrier waits for the largest of r such sums.

The cycle has a barrier over instances, m microbatches in flight and exposed communication: four servers stand in a ring
(attention, A→F link, FFN, F→A link), which m microbatches go round without overtaking. Its period Z for constant times
is the largest of (the maximum cycle mean of its event graph; `docs/explanation/afd-theory.md`)

    Σ_j a_j, attention always busy;   m·f, the FFN always busy;   m·c/2, one direction of the link always busy;
    max_j a_j + c + f, a microbatch never waits: communication is exposed.

Attention times do vary, a_j = α_A·(largest token load of x instances) + β_A, but slowly: a step replaces a few of an
instance's requests. So the mean period is the expectation of Z over independent microbatches in the steady state. The
paper's eq. 5 is the same without the first maximum over instances, with the mean load for the random one, and with
unlimited overlap.

Instances that advance on their own (`independent`) have periods Z_i with their own attention times in place of the
largest ones, and the bundle's period is the largest of these. A maximum of sums is at most the sum of the maxima, so it
is never longer. The instances' loads are independent, so it has the distribution P(Z_i ≤ z)^x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latency_models.stages import PassLatency
from schedulers.bundle_slots import Advance
from workloads.pairs import LengthPairs

Floats = NDArray[np.float64]

GRID = 1 << 14
REACH = 14.0
"""Standard deviations above its mean to which the grid of a sum extends."""


@dataclass(frozen=True, slots=True)
class LoadLaw:
    """The law of one instance's token load: increasing values and their distribution function, (n,), and exact mean."""

    values: Floats
    cdf: Floats
    mean: float

    def quantile(self, level: Floats) -> Floats:
        """Loads at the given probabilities, interpolated, any shape."""
        return np.interp(level, self.cdf, self.values)

    def largest_of(self, instances: float, level: Floats) -> Floats:
        """Quantiles of the largest of `instances` independent loads (the barrier); a real number of them is allowed."""
        return self.quantile(level ** (1 / instances))


def instance_load(slot_pmf: Floats, slots: int) -> LoadLaw:
    """The law of the sum of `slots` independent slots, each with mass `slot_pmf[l]` on load l, by its transform."""
    loads = np.arange(len(slot_pmf))
    mean = float(slot_pmf @ loads)
    deviation = math.sqrt(max(float(slot_pmf @ (loads - mean) ** 2), 0.0))
    centre, spread = slots * mean, math.sqrt(slots) * deviation
    if spread == 0:
        return constant_load(centre)
    top = max(centre + REACH * spread, float(len(slot_pmf)))
    width = top / (GRID - 1)
    positions = loads / width
    below = positions.astype(np.int64)
    part = positions - below
    mass = np.bincount(below, slot_pmf * (1 - part), GRID) + np.bincount(below + 1, slot_pmf * part, GRID)
    total = np.fft.irfft(np.fft.rfft(mass) ** slots, GRID)
    total = np.clip(total, 0.0, None)
    total /= total.sum()
    # A bin's mass lies around its grid point: half of it is below.
    cdf = np.cumsum(total) - total / 2
    keep = np.concatenate(([True], np.diff(cdf) > 1e-15))
    values: Floats = np.arange(GRID, dtype=np.float64) * width
    return LoadLaw(values[keep], cdf[keep], centre)


def constant_load(load: float) -> LoadLaw:
    return LoadLaw(np.array([load, load]), np.array([0.0, 1.0]), load)


def load_quantile(lengths: LengthPairs, slots: int, level: float, *, in_step: bool) -> float:
    """The quantile of the tokens of `slots` full slots; `in_step` with one decode length: of the fullest step."""
    decode = lengths.constant_decode
    if decode is None or not in_step:
        return float(instance_load(lengths.slot_load_pmf(), slots).quantile(np.array(level)))
    prompts = float(instance_load(lengths.prefill_pmf(), slots).quantile(np.array(level)))
    return prompts + slots * (decode - 1)


def load_phases(lengths: LengthPairs, slots: int, *, in_step: bool, limit: int = 64) -> Sequence[LoadLaw]:
    """The laws of an instance's load that take turns, equally often, in the steady state.

    One law suffices when decode lengths vary: slots drift apart and the mixture is the stationary law. When every
    decode length is the same D and all slots start `in_step`, they stay together for good: the load at phase k is the
    sum of B prompts plus B·k, and each phase is a law of its own (at most `limit` of them, evenly spaced, their mean
    kept).
    """
    decode = lengths.constant_decode
    if decode is None or not in_step:
        return [instance_load(lengths.slot_load_pmf(), slots)]
    prompts = instance_load(lengths.prefill_pmf(), slots)
    count = min(decode, limit)
    offsets = [slots * ((phase + 0.5) * decode / count - 0.5) for phase in range(count)]
    return [LoadLaw(prompts.values + offset, prompts.cdf, prompts.mean + offset) for offset in offsets]


NODES = 2048
INSTANCE_NODES = 1 << 15
"""Nodes of the distribution of one instance's period. The largest of many instances needs its upper end."""


@dataclass(frozen=True)
class CycleModel:
    """Mean cycle time and throughput of a bundle over its A/F ratio; `latency` is of a whole decode step.

    Cut into L passes, each 1/L of it, the ring turns L times as fast and L times as often, so the layers drop out.
    """

    latency: PassLatency
    batch_size: int
    microbatches: int
    phases: Sequence[LoadLaw]
    advance: Advance = "lockstep"

    @cached_property
    def _levels(self) -> Floats:
        """Probability levels of m independent microbatches, shape (nodes, m)."""
        return _kronecker(max(NODES // len(self.phases), 64), self.microbatches)

    @cached_property
    def _instance_attention(self) -> list[Floats]:
        """Attention times of one instance's m microbatches in each phase, shape (nodes, m)."""
        alpha, beta = self.latency.attention
        levels = _kronecker(max(INSTANCE_NODES // len(self.phases), 64), self.microbatches)
        return [alpha * law.quantile(levels) + beta for law in self.phases]

    def period(self, attention: Floats, ratio: float) -> Floats:
        """The period Z for attention times of shape (…, m); shape (…)."""
        alpha_c, beta_c = self.latency.communication
        alpha_f, beta_f = self.latency.ffn
        m = self.microbatches
        round_trip = alpha_c * self.batch_size + beta_c
        ffn = alpha_f * ratio * self.batch_size + beta_f
        slowest_server = np.maximum(attention.sum(axis=-1), m * max(ffn, round_trip / 2))
        periods: Floats = np.maximum(slowest_server, attention.max(axis=-1) + round_trip + ffn)
        return periods

    def step_time(self, ratio: float, attention_instances: float | None = None) -> float:
        """Mean time between the ends of consecutive microbatch steps, barrier included; by default of r instances."""
        instances = ratio if attention_instances is None else attention_instances
        if self.advance == "independent":
            return self._independent_period(ratio, instances) / self.microbatches
        alpha, beta = self.latency.attention
        slowest = [alpha * law.largest_of(instances, self._levels) + beta for law in self.phases]
        periods = [self.period(attention, ratio).mean() for attention in slowest]
        return float(np.mean(periods)) / self.microbatches

    def _independent_period(self, ratio: float, instances: float) -> float:
        """E[max Z_i] over `instances` instances: the quantile function of Z_i, weighed by the largest one's law."""
        means = []
        for attention in self._instance_attention:
            periods = np.sort(self.period(attention, ratio))
            below = (np.arange(len(periods) + 1) / len(periods)) ** instances
            means.append(float(periods @ np.diff(below)))
        return float(np.mean(means))

    def step_time_at_mean_load(self, ratio: float) -> float:
        """The same ring with every load at its mean: exposed communication remains, the barrier does not."""
        alpha, beta = self.latency.attention
        periods = [
            float(self.period(np.full(self.microbatches, alpha * law.mean + beta), ratio)) for law in self.phases
        ]
        return float(np.mean(periods)) / self.microbatches

    def step_time_unlimited_overlap(self, ratio: float) -> float:
        """The time of eq. 5 at the exact mean load: the slowest stage alone, where the round trip is one stage."""
        alpha, beta = self.latency.attention
        alpha_c, beta_c = self.latency.communication
        alpha_f, beta_f = self.latency.ffn
        load = float(np.mean([law.mean for law in self.phases]))
        stages = (alpha * load + beta, alpha_c * self.batch_size + beta_c, alpha_f * ratio * self.batch_size + beta_f)
        return max(stages)

    def throughput(self, ratio: float, attention_instances: float | None = None) -> float:
        """Output tokens per time unit and instance in the steady state."""
        return self.rate(ratio, self.step_time(ratio, attention_instances))

    def rate(self, ratio: float, step_time: float) -> float:
        """Output tokens per time unit and instance at a step time."""
        return ratio * self.batch_size / ((ratio + 1) * step_time)

    def throughput_per_card(self, ratio: float, attention_cards: int, ffn_cards: int) -> float:
        """Output tokens per time unit and card in the steady state, with r attention instances and one FFN instance."""
        return ratio * self.batch_size / ((ratio * attention_cards + ffn_cards) * self.step_time(ratio))

    def best_ratio(
        self, low: float = 0.25, high: float = 256.0, *, attention_cards: int = 1, ffn_cards: int = 1
    ) -> float:
        """The ratio in [low, high] with the highest throughput per card, to about 0.1 %."""
        for _ in range(3):
            grid = np.geomspace(low, high, 25)
            rates = [self.throughput_per_card(float(ratio), attention_cards, ffn_cards) for ratio in grid]
            best = int(np.argmax(rates))
            low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
        return float(grid[best])


def _kronecker(nodes: int, dimension: int) -> Floats:
    """A low-discrepancy (Kronecker) sequence in the unit cube, shape (nodes, dimension); midpoints in one dimension."""
    if dimension == 1:
        return ((np.arange(nodes) + 0.5) / nodes)[:, None]
    root = 2.0  # that above 1 of x^(d+1) = x + 1, whose powers spread the sequence most evenly
    for _ in range(64):
        root = (1 + root) ** (1 / (dimension + 1))
    steps = root ** -np.arange(1, dimension + 1)
    levels: Floats = (0.5 + np.outer(np.arange(1, nodes + 1), steps)) % 1.0
    return levels
