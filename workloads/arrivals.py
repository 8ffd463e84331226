"""Arrival processes: the times of requests.

A renewal process starts at time 0 and its first request comes after the first gap, so n requests take n gaps.
Rates are in requests per time unit: per second, or per cycle where a calibration says so.

`times` gives the first n at once, `stream` gives them part by part. Both give the same times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from workloads.checks import FloatArray, instants, number, whole
from workloads.errors import BadInput

TimeStream: TypeAlias = Callable[[int], FloatArray]
"""Called with n, it gives the arrival times of the next n requests, shape (n,)."""

_SLOWEST, _FASTEST = 1e-12, 1e12


class Arrivals(ABC):
    """A source of arrival times."""

    @property
    def is_random(self) -> bool:
        """True if the times depend on the generator that `stream` gets."""
        return False

    @abstractmethod
    def stream(self, rng: np.random.Generator) -> TimeStream:
        """A source of arrival times that starts at 0; from now on `rng` is its own."""

    def times(self, rng: np.random.Generator, size: int) -> FloatArray:
        """The times of the first `size` requests, from 0 on and never going backwards, shape (size,)."""
        return self.stream(rng)(whole(size, "size", low=0))


@dataclass(frozen=True)
class ClosedLoop(Arrivals):
    """All requests arrive at time 0 and wait for a slot, so that slots never run empty."""

    def stream(self, rng: np.random.Generator) -> TimeStream:
        return np.zeros


@dataclass(frozen=True)
class Poisson(Arrivals):
    """Exponential gaps with mean 1/rate. Raises `BadInput` unless 1e-12 <= rate <= 1e12."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    @property
    def is_random(self) -> bool:
        return True

    def stream(self, rng: np.random.Generator) -> TimeStream:
        return _after_gaps(lambda size: rng.exponential(1.0 / self.rate, size))


@dataclass(frozen=True)
class Gamma(Arrivals):
    """Gamma-distributed gaps with mean 1/rate and a cv: bursts above 1, Poisson at 1; never clipped.

    Raises `BadInput` unless 1e-12 <= rate <= 1e12 and 0.001 <= cv <= 100.
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        number(self.cv, "cv", low=1e-3, high=100, hint="; Deterministic has no variation")

    @property
    def is_random(self) -> bool:
        return True

    def stream(self, rng: np.random.Generator) -> TimeStream:
        shape = self.cv**-2
        return _after_gaps(lambda size: rng.gamma(shape, 1.0 / (shape * self.rate), size))


@dataclass(frozen=True)
class Deterministic(Arrivals):
    """Equal gaps of 1/rate. Raises `BadInput` unless 1e-12 <= rate <= 1e12."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def stream(self, rng: np.random.Generator) -> TimeStream:
        count = 0

        def following(size: int) -> FloatArray:
            nonlocal count
            count += size
            return np.arange(count - size + 1, count + 1) / self.rate

        return following


@dataclass(frozen=True, init=False, eq=False)
class Replay(Arrivals):
    """Recorded times, used as they are, (n,): finite, 0 or later, never backwards, and enough, else `BadInput`."""

    recorded: FloatArray

    def __init__(self, recorded: Sequence[float] | FloatArray) -> None:
        object.__setattr__(self, "recorded", instants(recorded, "recorded"))

    def stream(self, rng: np.random.Generator) -> TimeStream:
        count = 0

        def following(size: int) -> FloatArray:
            nonlocal count
            count += size
            if count > len(self.recorded):
                expected = f"expected at most the {len(self.recorded)} recorded arrivals"
                raise BadInput(expected, field="size", value=count)
            return self.recorded[count - size : count].copy()

        return following


def _after_gaps(gaps: TimeStream) -> TimeStream:
    """Times from gaps. Each gap is added to the time before it, so that sums do not depend on the size of a draw."""
    last = 0.0

    def following(size: int) -> FloatArray:
        nonlocal last
        times = np.cumsum(np.concatenate(([last], gaps(size))))
        last = float(times[-1])
        return times[1:]

    return following


def _check_rate(rate: float) -> None:
    number(rate, "rate", low=_SLOWEST, high=_FASTEST, hint=" requests per time unit")


SMALLEST_CV = 1e-3
"""Smallest coefficient of variation of gamma-distributed times, as in `workloads.arrivals.Gamma`."""

LONGEST = 1e9
"""Longest mean of a pause, seconds."""


@dataclass(frozen=True)
class Pauses:
    """Gamma-distributed pauses of the given mean, seconds, and coefficient of variation; with cv 0 all are alike.

    Raises `BadInput` unless 0 <= mean <= 1e9, and cv is 0 or 0.001 <= cv <= 100.
    """

    mean: float
    cv: float = 0.0

    def __post_init__(self) -> None:
        number(self.mean, "mean", low=0, high=LONGEST, hint=" seconds")
        number(self.cv, "cv", low=0, high=100)
        if 0 < self.cv < SMALLEST_CV:
            raise BadInput(f"expected 0, or at least {SMALLEST_CV}", field="cv", value=self.cv)

    @property
    def is_constant(self) -> bool:
        """True if there is only one pause to draw."""
        return not (self.mean and self.cv)

    def stream(self, rng: np.random.Generator) -> Callable[[], float]:
        """A function that draws the next pause, seconds; from now on `rng` is its own."""
        if self.is_constant:
            return lambda: self.mean
        shape = self.cv**-2
        return lambda: float(rng.gamma(shape, self.mean / shape))
