"""The token load of an attention instance whose slots are always full, for any length distribution.

Renewal-reward: a request with prefill s and decode length D keeps its slot for D steps, with loads s, s + 1, …, s + D
− 1. Seen at a random step, a slot therefore carries θ = E[PD]/E[D] + E[D(D − 1)]/(2 E[D]) tokens in the mean, and its
whole distribution is known too. The B slots of an instance are independent, so their sum has a known distribution,
and the barrier waits for the largest of r such sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
