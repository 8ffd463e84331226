"""Arrival processes: when requests come.

A renewal process starts at time 0 and its first request comes after the first gap, so n requests take n gaps.
Rates are in requests per time unit: per second, or per cycle where a calibration says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workloads.checks import FloatArray, instants, number, whole
from workloads.errors import BadInput

_SLOWEST, _FASTEST = 1e-12, 1e12


class Arrivals(Protocol):
    """A source of arrival times."""

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        """The times of the first `size` requests, from 0 on and never going backwards, shape (size,)."""


@dataclass(frozen=True)
class ClosedLoop:
    """Every request is there at time 0 and waits for a slot, so that slots never run empty."""

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        return np.zeros(whole(size, "size", low=0))


@dataclass(frozen=True)
class Poisson:
    """Exponential gaps with mean 1/rate. Raises `BadInput` unless 1e-12 <= rate <= 1e12."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        return np.cumsum(rng.exponential(1.0 / self.rate, whole(size, "size", low=0)))


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed gaps with mean 1/rate and the given coefficient of variation.

    A cv above 1 comes in bursts, 1 is Poisson, below 1 is smoother. Gaps are used as drawn, never clipped, so
    the rate holds. Raises `BadInput` unless 1e-12 <= rate <= 1e12 and 0.001 <= cv <= 100.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        number(self.cv, "cv", low=1e-3, high=100, hint="; Deterministic has no variation")

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        shape = self.cv**-2
        return np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate), whole(size, "size", low=0)))


@dataclass(frozen=True)
class Deterministic:
    """Equal gaps of 1/rate. Raises `BadInput` unless 1e-12 <= rate <= 1e12."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        return np.arange(1, whole(size, "size", low=0) + 1) / self.rate


@dataclass(frozen=True, init=False, eq=False)
class Replay:
    """Recorded times, used as they are: neither shifted nor repeated (read-only float64 array, shape (n,)).

    Raises `BadInput` unless they are finite, 0 or later and never go backwards; and from `times` when more
    requests are asked for than were recorded.
    """

    recorded: FloatArray

    def __init__(self, recorded: Sequence[float] | FloatArray) -> None:
        object.__setattr__(self, "recorded", instants(recorded, "recorded"))

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        if whole(size, "size", low=0) > len(self.recorded):
            raise BadInput(f"expected at most the {len(self.recorded)} recorded arrivals", field="size", value=size)
        return self.recorded[:size].copy()


def _check_rate(rate: float) -> None:
    number(rate, "rate", low=_SLOWEST, high=_FASTEST, hint=" requests per time unit")
