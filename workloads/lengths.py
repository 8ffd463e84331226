"""Distributions of the lengths of prompts and answers, tokens.

Each family is a small frozen object that draws from a given generator. Its moments are those of the whole numbers that
`sample` draws, not those of the continuous curve behind them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from workloads.checks import MAX_TOKENS, FloatArray, IntArray, number, token_counts, whole
from workloads.errors import BadInput

REACH = 9.0
"""Standard deviations kept on either side. The mass beyond is 1e-19 and is left out."""

_STEP = 1 / 32
_TERMS = 8


def upper_tail(z: FloatArray) -> FloatArray:
    """Probabilities P(Z > z) of a standard normal Z, in the shape of `z`. Points are limited to ±`REACH`."""
    knots = round(REACH / _STEP)
    positions = np.arange(-knots, knots + 1, dtype=np.float64) * _STEP
    z = np.clip(z, -REACH, REACH)
    nearest = np.rint(z / _STEP)
    offset = z - nearest * _STEP
    at = nearest.astype(np.intp) + knots
    highest, *lower = _taylor(positions)
    tail = highest[at]
    for coefficient in lower:
        tail *= offset
        tail += coefficient[at]
    return tail


def _taylor(x: FloatArray) -> list[FloatArray]:
    """The coefficients of d^8, d^7, ... d^0 at each knot, highest power first."""
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    coefficients = [np.array([math.erfc(knot / math.sqrt(2)) / 2 for knot in x.tolist()])]
    hermite, previous = np.ones_like(x), np.zeros_like(x)
    for n in range(_TERMS):
        coefficients.append((-1) ** (n + 1) * hermite * density / math.factorial(n + 1))
        hermite, previous = x * hermite - n * previous, hermite
    return coefficients[::-1]


PMF_ENTRIES = 2**22
"""Maximum length of a `pmf`. Its last entry holds all mass beyond."""

_TAIL = 1e-12
_TAIL_Z = 7.034484  # P(Z > 7.034484) = 1e-12 for a standard normal Z
_EXACT_TERMS = 2**16


class _Spread:
    """A distribution of lengths in tokens.

    `mean`, `variance`: of the drawn lengths. `minimum`: the shortest that can be drawn. `sample(rng, size)` gives
    independent ones, shape (size,). `pmf()`: probabilities P(length = k) at index k, summing to 1; the last entry also
    holds the far tail, at most 1e-12 of mass, or all that lies beyond `PMF_ENTRIES`.
    """

    @property
    def cv(self: Any) -> float:
        """Standard deviation over mean; 0 when every length is 0."""
        return math.sqrt(self.variance) / self.mean if self.mean else 0.0

    @property
    def is_constant(self: Any) -> bool:
        """True if there is only one length to draw."""
        return not self.variance


@dataclass(frozen=True)
class Fixed(_Spread):
    """Always `value` tokens. Raises `BadInput` unless it is a whole number, 0 or more."""

    value: int

    def __post_init__(self) -> None:
        whole(self.value, "value", low=0)

    @property
    def mean(self) -> float:
        return float(self.value)

    @property
    def variance(self) -> float:
        return 0.0

    @property
    def minimum(self) -> int:
        return self.value

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        return np.full(whole(size, "size", low=0), self.value, dtype=np.int64)

    def pmf(self) -> FloatArray:
        mass = np.zeros(min(self.value + 1, PMF_ENTRIES))
        mass[-1] = 1.0
        return mass


@dataclass(frozen=True)
class Geometric(_Spread):
    """Lengths 1, 2, ... that end after each token with probability p = 1/mean; `BadInput` unless 1 <= mean <= 1e9.

    The AFD paper's section 3.3 counts from 0, where p = 1/(mean + 1); here an answer has at least one token.
    """

    mean: float

    def __post_init__(self) -> None:
        number(self.mean, "mean", low=1, high=MAX_TOKENS)

    @property
    def variance(self) -> float:
        return self.mean * (self.mean - 1.0)

    @property
    def minimum(self) -> int:
        return 1

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        return rng.geometric(1.0 / self.mean, whole(size, "size", low=0)).astype(np.int64)

    def pmf(self) -> FloatArray:
        p = 1.0 / self.mean
        if p == 1.0:
            return np.array([0.0, 1.0])
        log_stay = math.log1p(-p)
        last = min(math.ceil(math.log(_TAIL) / log_stay) + 1, PMF_ENTRIES - 1)
        mass: FloatArray = np.exp(np.arange(-1, last) * log_stay) * p
        mass[0] = 0.0
        mass[-1] /= p
        return mass


@dataclass(frozen=True)
class Uniform(_Spread):
    """Whole numbers from `low` to `high`, both included. Raises `BadInput` unless 0 <= low <= high."""

    low: int
    high: int

    def __post_init__(self) -> None:
        whole(self.low, "low", low=0)
        whole(self.high, "high", low=self.low)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def variance(self) -> float:
        return ((self.high - self.low + 1) ** 2 - 1) / 12

    @property
    def minimum(self) -> int:
        return self.low

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        return rng.integers(self.low, self.high, whole(size, "size", low=0), dtype=np.int64, endpoint=True)

    def pmf(self) -> FloatArray:
        last = min(self.high, PMF_ENTRIES - 1)
        mass = np.zeros(last + 1)
        mass[self.low :] = 1.0
        mass[-1] = self.high - max(self.low, last) + 1
        mass /= self.high - self.low + 1
        return mass


@dataclass(frozen=True, init=False)
class LogNormal(_Spread):
    """exp(N(μ, σ²)) rounded to the nearest whole number and never below 1.

    `mean` and `cv` at construction are the label, which fixes μ and σ; the attributes are those of the rounded lengths.
    Raises `BadInput` unless 1 <= mean <= 1e9 and 1e-6 <= cv <= 100, and where rounding moves the mean by over 1 %.
    """

    label_mean: float
    label_cv: float

    def __init__(self, mean: float, cv: float) -> None:
        label = number(mean, "mean", low=1, high=MAX_TOKENS)
        object.__setattr__(self, "label_mean", label)
        variation = number(cv, "cv", low=1e-6, high=100, hint="; Fixed has no variation")
        object.__setattr__(self, "label_cv", variation)
        if abs(self.mean - label) > 0.01 * label:
            reason = f"with cv {cv:g} it would become {self.mean:.4g}"
            raise BadInput(f"expected a mean that rounding keeps within 1 %; {reason}", field="mean", value=mean)

    @property
    def mean(self) -> float:
        return self._moments[0]

    @property
    def variance(self) -> float:
        return self._moments[1]

    @property
    def minimum(self) -> int:
        return 1

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        curve = rng.lognormal(*_log_normal(self.label_mean, self.label_cv), whole(size, "size", low=0))
        return np.maximum(np.rint(curve), 1.0).astype(np.int64)

    def pmf(self) -> FloatArray:
        mu, sigma = _log_normal(self.label_mean, self.label_cv)
        last = min(math.ceil(math.exp(mu + _TAIL_Z * sigma)) + 1, PMF_ENTRIES - 1)
        above = _above(np.arange(1, last, dtype=np.float64), mu, sigma)
        return np.concatenate(([0.0], -np.diff(above, prepend=1.0, append=0.0)))

    @property
    def _moments(self) -> tuple[float, float]:
        """Mean and variance of the rounded lengths."""
        return _moments(self.label_mean, self.label_cv)


@lru_cache(1024)
def _moments(mean: float, cv: float) -> tuple[float, float]:
    """Mean and variance of the drawn lengths of `LogNormal(mean, cv)`, cached for the points of a sweep.

    Beyond the first `_EXACT_TERMS` lengths the curve is so wide that its own moments are right to 1e-8 of their size:
    E[Y^j; Y > t] = E[Y^j] Q((ln t - μ)/σ - jσ).
    """
    mu, sigma = _log_normal(mean, cv)
    first = max(1, math.floor(math.exp(mu - REACH * sigma)))
    last = min(math.ceil(math.exp(mu + REACH * sigma)) + 1, first + _EXACT_TERMS)
    lengths = np.arange(first, last + 1, dtype=np.float64)
    mass = -np.diff(_above(lengths, mu, sigma), prepend=1.0)
    away = lengths - mean
    z = (math.log(last + 0.5) - mu) / sigma
    beyond = upper_tail(np.array([z, z - sigma, z - 2 * sigma]))
    y0, y1, y2 = beyond * [1.0, mean, math.exp(2 * (mu + sigma**2))]
    shift = float(mass @ away + (y1 - mean * y0))
    square = float(mass @ away**2 + (y2 - 2 * mean * y1 + mean**2 * y0))
    return mean + shift, max(square - shift**2, 0.0)


def _log_normal(mean: float, cv: float) -> tuple[float, float]:
    sigma = math.sqrt(math.log1p(cv**2))
    return math.log(mean) - sigma**2 / 2, sigma


def _above(lengths: FloatArray, mu: float, sigma: float) -> FloatArray:
    """Probabilities P(length > k) for each k, never increasing."""
    tail = upper_tail((np.log(lengths + 0.5) - mu) / sigma)
    return np.minimum.accumulate(np.minimum(tail, 1.0))


@dataclass(frozen=True, init=False, eq=False)
class Empirical(_Spread):
    """Lengths drawn with replacement from values, (n,) int64; `BadInput` unless these are whole numbers, 0 or more."""

    values: IntArray

    def __init__(self, values: Sequence[int] | IntArray) -> None:
        object.__setattr__(self, "values", token_counts(values, "values"))

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def variance(self) -> float:
        return float(self.values.var())

    @property
    def minimum(self) -> int:
        return int(self.values.min())

    def sample(self, rng: np.random.Generator, size: int) -> IntArray:
        return self.values[rng.integers(0, len(self.values), whole(size, "size", low=0))]

    def pmf(self) -> FloatArray:
        return np.bincount(np.minimum(self.values, PMF_ENTRIES - 1)) / len(self.values)


Lengths: TypeAlias = Fixed | Geometric | Uniform | LogNormal | Empirical
