"""Arrivals: processes by which requests come, and rates that change over time.

A renewal process starts at time 0 and its first request comes after the first gap, so n requests take n gaps.
Rates are in requests per time unit: per second, or per cycle where a calibration says so.

`times` gives the first n at once, `stream` gives them part by part. Both give the same times.

A rate may change over time: a profile that repeats, and bursts at random times. A process of constant rate R is
stretched: its n-th time τ becomes the t at which ∫ m(u) du = τ from 0 to t, where m is the rate relative to its mean.
Poisson arrivals so become the inhomogeneous Poisson process of rate R·m(t), without thinning; gamma and equal gaps keep
their order and their variation relative to the rate of the moment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

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
class Steady(Arrivals):
    """Base class of processes with gaps of mean 1/rate; `BadInput` unless 1e-12 <= rate <= 1e12."""

    rate: float

    def __post_init__(self) -> None:
        number(self.rate, "rate", low=_SLOWEST, high=_FASTEST, hint=" requests per time unit")

    @property
    def is_random(self) -> bool:
        return not isinstance(self, Deterministic)


@dataclass(frozen=True)
class Poisson(Steady):
    """Exponential gaps."""

    def stream(self, rng: np.random.Generator) -> TimeStream:
        return _after_gaps(lambda size: rng.exponential(1.0 / self.rate, size))


@dataclass(frozen=True)
class Gamma(Steady):
    """Gamma-distributed gaps with a cv: bursts above 1, Poisson at 1; never clipped. Raises `BadInput` unless
    0.001 <= cv <= 100.
    """

    cv: float

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self.cv, "cv", low=1e-3, high=100, hint="; Deterministic has no variation")

    def stream(self, rng: np.random.Generator) -> TimeStream:
        shape = self.cv**-2
        return _after_gaps(lambda size: rng.gamma(shape, 1.0 / (shape * self.rate), size))


@dataclass(frozen=True)
class Deterministic(Steady):
    """Equal gaps."""

    def stream(self, rng: np.random.Generator) -> TimeStream:
        return _counted(lambda first, last: np.arange(first + 1, last + 1) / self.rate)


@dataclass(frozen=True, init=False, eq=False)
class Replay(Arrivals):
    """Recorded times, used as they are, (n,): finite, 0 or later, never backwards, and enough, else `BadInput`."""

    recorded: FloatArray

    def __init__(self, recorded: Sequence[float] | FloatArray) -> None:
        object.__setattr__(self, "recorded", instants(recorded, "recorded"))

    def stream(self, rng: np.random.Generator) -> TimeStream:
        def times(first: int, last: int) -> FloatArray:
            if last > len(self.recorded):
                expected = f"expected at most the {len(self.recorded)} recorded arrivals"
                raise BadInput(expected, field="size", value=last)
            return self.recorded[first:last].copy()

        return _counted(times)


def _counted(times: Callable[[int, int], FloatArray]) -> TimeStream:
    """Times of requests by their numbers from the first, from 0, to before the last."""
    count = 0

    def following(size: int) -> FloatArray:
        nonlocal count
        first, count = count, count + size
        return times(first, count)

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


Piece: TypeAlias = tuple[float, float, float]
"""Seconds, and the relative rates at the begin and at the end: straight in between."""

DAY_PIECES = 96
"""Straight pieces of a day's curve: a quarter of an hour each; at most 0.1 % of the swing away from it."""

SHORTEST = 1e-3
"""Seconds of a piece, and of a burst, at least."""


@dataclass(frozen=True)
class Profile:
    """A relative rate that repeats after its last piece, scaled to a mean of 1 over a period.

    Raises `BadInput` for no pieces, lengths that are not above 0, rates below 0, and a rate that is 0 throughout.
    """

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        whole(len(self.pieces), "pieces", low=1)
        for length, begin, end in self.pieces:
            number(length, "seconds", low=SHORTEST, high=1e12)
            for rate in (begin, end):
                number(rate, "rate", low=0.0, high=1e12)
        mean = sum(map(_area, self.pieces)) / self.period
        if not mean > 0:
            raise BadInput("expected a rate above 0 at some time", field="profile", value=mean)
        object.__setattr__(self, "pieces", tuple((piece[0], piece[1] / mean, piece[2] / mean) for piece in self.pieces))

    @property
    def period(self) -> float:
        """Seconds after which the profile repeats."""
        return math.fsum(length for length, _, _ in self.pieces)

    @property
    def peak(self) -> float:
        """The highest rate relative to the mean."""
        return max(max(begin, end) for _, begin, end in self.pieces)

    @classmethod
    def of_points(cls, points: Sequence[tuple[float, float]], between: Literal["steps", "ramps"]) -> Profile:
        """From (seconds, rate) in the order of time, the first at 0; the time of the last one is the period.

        Steps keep each rate until the next point. `BadInput` for fewer than two points, or times that do not increase.
        """
        times = [time for time, _ in points]
        if len(points) < 2 or times[0] != 0 or any(a >= b for a, b in pairwise(times)):
            expected = "expected two points or more, [seconds, rate], from 0 seconds on and increasing"
            raise BadInput(expected, field="points", value=list(map(list, points))[:10])
        pairs = pairwise(points)
        return cls(tuple((b - a, first, first if between == "steps" else last) for (a, first), (b, last) in pairs))

    @classmethod
    def of_day(cls, swing: float, peak_at: float, period: float = 86400.0) -> Profile:
        """One sine wave a period: 1 + swing·cos(2π (t - peak_at) / period), with swing from 0 to 1."""
        number(swing, "swing", low=0.0, high=1.0)
        number(period, "period", low=DAY_PIECES * SHORTEST, high=1e12)
        times = [i * period / DAY_PIECES for i in range(DAY_PIECES + 1)]
        rates = [1 + swing * math.cos(2 * math.pi * (time - peak_at) / period) for time in times]
        return cls.of_points(list(zip(times, (max(rate, 0.0) for rate in rates), strict=True)), "ramps")

    def repeated(self, start: float) -> Iterator[Piece]:
        """The pieces from `start` seconds on, without end."""
        skip = start % self.period
        for length, begin, end in self.pieces:
            if skip < length:
                at = begin + (end - begin) * skip / length
                yield length - skip, at, end
                skip = 0.0
            else:
                skip -= length
        while True:
            yield from self.pieces


@dataclass(frozen=True)
class Bursts:
    """Times at which the rate is `factor` times that between them. The mean rate stays.

    Both last an exponential time, of mean `seconds` and `every` - `seconds`: a Markov-modulated process. Raises
    `BadInput` unless factor >= 1 and 0 < seconds < every.
    """

    factor: float
    seconds: float
    every: float

    def __post_init__(self) -> None:
        number(self.factor, "factor", low=1.0, high=1e6)
        number(self.seconds, "seconds", low=SHORTEST, high=1e12)
        number(self.every, "every", low=SHORTEST, high=1e12)
        if self.seconds >= self.every:
            expected = f"expected less than every, {self.every:g}: the mean time from one burst to the next"
            raise BadInput(expected, field="seconds", value=self.seconds)

    @property
    def levels(self) -> tuple[float, float]:
        """The relative rates between bursts and in them."""
        share = self.seconds / self.every
        quiet = 1 / (1 - share + share * self.factor)
        return quiet, quiet * self.factor

    def pieces(self, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        """Seconds and relative rates, without end; at 0 a burst is under way with the probability of any time."""
        means = (self.every - self.seconds, self.seconds)
        state = int(rng.random() < self.seconds / self.every)
        while True:
            yield float(rng.exponential(means[state])), self.levels[state]
            state = 1 - state


@dataclass(frozen=True)
class Varying(Arrivals):
    """A process whose rate follows a profile, bursts, or both; `start`: seconds into the profile, None: drawn."""

    base: Steady
    profile: Profile | None = None
    bursts: Bursts | None = None
    start: float | None = 0.0

    @property
    def is_random(self) -> bool:
        draws_start = self.start is None and self.profile is not None and len(self.profile.pieces) > 1
        return self.base.is_random or self.bursts is not None or draws_start

    def stream(self, rng: np.random.Generator) -> TimeStream:
        for_rate, for_bursts, for_base = rng.spawn(3)
        stretched = _Stretched(self._pieces(for_rate, for_bursts))
        base = self.base.stream(for_base)
        return lambda size: stretched.times(base(size))

    def _pieces(self, for_start: np.random.Generator, for_bursts: np.random.Generator) -> Iterator[Piece]:
        profile = self.profile or Profile(((1.0, 1.0, 1.0),))
        start = float(for_start.random()) * profile.period if self.start is None else self.start
        pieces = profile.repeated(start)
        return pieces if self.bursts is None else _merged(pieces, self.bursts.pieces(for_bursts))


def peak_of(arrivals: Arrivals) -> float:
    """The highest rate of a process relative to its mean; 1 for one of constant rate."""
    if not isinstance(arrivals, Varying):
        return 1.0
    profile = 1.0 if arrivals.profile is None else arrivals.profile.peak
    return profile * (1.0 if arrivals.bursts is None else arrivals.bursts.levels[1])


def _merged(pieces: Iterator[Piece], bursts: Iterator[tuple[float, float]]) -> Iterator[Piece]:
    """Pieces cut where bursts begin and end, with the product of both rates."""
    remaining, level = next(bursts)
    for length, begin, end in pieces:
        offset = 0.0
        while offset < length:
            if remaining <= 0:
                remaining, level = next(bursts)
            part = min(remaining, length - offset)
            rates = (begin + (end - begin) * at / length for at in (offset, offset + part))
            low, high = (level * rate for rate in rates)
            yield part, low, high
            # What remains of a piece may be too short to change `offset`.
            offset = length if part == length - offset else offset + part
            remaining -= part


class _Stretched:
    """Turns times of a process of constant rate into those of pieces; called with later times each time."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self._source = pieces
        self._known: list[tuple[float, float, Piece]] = []  # time and ∫ m at the begin of each piece
        self._time = 0.0
        self._integral = 0.0

    def times(self, integrals: FloatArray) -> FloatArray:
        """The times at which ∫ m reaches these values, which do not decrease."""
        if not len(integrals):
            return np.zeros(0)
        while self._integral < integrals[-1]:
            piece = next(self._source)
            self._known.append((self._time, self._integral, piece))
            self._time += piece[0]
            self._integral += _area(piece)
        begins = np.array([[time, integral, *piece] for time, integral, piece in self._known])
        index = np.maximum(np.searchsorted(begins[:, 1], integrals, side="left") - 1, 0)
        time, integral, length, low, high = begins[index].T
        area = integrals - integral
        # low·x + (high - low)·x²/(2·length) = area, in the form that has no difference of close numbers
        root = low + np.sqrt(np.maximum(low**2 + 2 * area * (high - low) / length, 0.0))
        inside = np.divide(2 * area, root, out=np.zeros_like(area), where=root > 0)
        self._known = self._known[index[-1] :]
        times: FloatArray = np.maximum.accumulate(time + np.minimum(inside, length))
        return times


def _area(piece: Piece) -> float:
    length, begin, end = piece
    return length * (begin + end) / 2
