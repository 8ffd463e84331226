"""Joint distributions of prefill length P and decode length D, and the token load they put on a decode slot.

A slot that is always full holds one request after another. A request with prefill P stays for D decode steps
with loads P, P + 1, ..., P + D - 1. Long answers stay longer, so a slot seen at a random step carries more
than E[P] tokens:

    θ = E[P D] / E[D] + E[D (D - 1)] / (2 E[D])

This is the renewal-reward theorem; it needs no assumption about the shape of P or D, nor that they are
independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from workloads.checks import FloatArray, IntArray, number, token_counts, whole
from workloads.errors import BadInput
from workloads.lengths import PMF_ENTRIES, Empirical, Lengths

PairStream: TypeAlias = Callable[[int], tuple[IntArray, IntArray]]
"""Called with n, it gives the next n pairs as two arrays, prefill and decode, each of shape (n,)."""

_MEAN_KEPT = 1e-3


@dataclass(frozen=True)
class Independent:
    """Independent prefill and decode lengths, tokens; `BadInput` if a decode could be of 0 tokens."""

    prefill: Lengths
    decode: Lengths

    def __post_init__(self) -> None:
        if self.decode.minimum < 1:
            raise BadInput("expected lengths of at least 1 token", field="decode", value=self.decode)

    @property
    def mean_prefill(self) -> float:
        """E[P], tokens."""
        return self.prefill.mean

    @property
    def mean_decode(self) -> float:
        """E[D], tokens."""
        return self.decode.mean

    @property
    def covariance(self) -> float:
        """Cov(P, D), tokens squared."""
        return 0.0

    @property
    def constant_decode(self) -> int | None:
        """The decode length if every request has the same, else None."""
        return round(self.decode.mean) if self.decode.is_constant else None

    @property
    def is_constant(self) -> bool:
        return self.prefill.is_constant and self.decode.is_constant

    def prefill_pmf(self) -> FloatArray:
        """Probabilities P(P = s) at index s, from 0 up, of a new request."""
        return self.prefill.pmf()

    def sample(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        """`size` independent pairs as two arrays, prefill and decode, each of shape (size,)."""
        prefill = self.prefill.sample(rng, size)
        return prefill, self.decode.sample(rng, size)

    def stream(self, rng: np.random.Generator) -> PairStream:
        """A source of independent pairs, which do not depend on the size of a draw; it takes `rng` over."""
        prompts, answers = rng.spawn(2)
        return lambda size: (self.prefill.sample(prompts, size), self.decode.sample(answers, size))

    def sample_resident(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        """Pairs of the requests in a slot at random decode steps: each is as likely as its decode is long.

        Inverts the decode length's table, for a correct far tail.
        """
        mass = self.decode.pmf()
        cumulative = np.cumsum(mass * np.arange(len(mass)))
        decode: IntArray = np.searchsorted(cumulative, rng.random(size) * cumulative[-1], side="right")
        return self.prefill.sample(rng, size), decode

    def renewal_load(self) -> float:
        """Mean token load θ of one always-full slot."""
        mean = self.decode.mean
        return self.prefill.mean + (self.decode.variance + mean * (mean - 1.0)) / (2.0 * mean)

    def load_beyond(self, age: int) -> float:
        """The part of θ, tokens, due to requests that have decoded `age` tokens or more; θ itself at age 0."""
        later = _age_pmf(self.decode.pmf())[age:]
        return float(later @ (self.prefill.mean + age + np.arange(len(later))))

    def slot_load_pmf(self) -> FloatArray:
        """P(load = l) at index l of one full slot at a random decode step; `BadInput` far beyond `PMF_ENTRIES`.

        The prefill's mass convolved with that of the age.
        """
        prefill, age = self.prefill.pmf(), _age_pmf(self.decode.pmf())
        if self.prefill.is_constant:
            load = np.concatenate((np.zeros(len(prefill) - 1), age))
        else:
            load = _convolve(prefill, age)
        table_mean, mean = float(np.arange(len(load)) @ load), self.renewal_load()
        if abs(table_mean - mean) > _MEAN_KEPT * mean:
            raise _too_long(f"{self}, whose mean load {mean:.6g} would become {table_mean:.6g}")
        return load


@dataclass(frozen=True, init=False, eq=False)
class JointEmpirical:
    """Pairs drawn with replacement from measured ones, (n,) int64 each, so that long prompts keep their answers.

    Raises `BadInput` unless there is one, both have one length, prefill is 0 or more and decode 1 or more.
    """

    prefill_values: IntArray
    decode_values: IntArray

    def __init__(self, prefill_values: Sequence[int] | IntArray, decode_values: Sequence[int] | IntArray) -> None:
        prefill = token_counts(prefill_values, "prefill_values")
        decode = token_counts(decode_values, "decode_values", low=1)
        if len(prefill) != len(decode):
            raise BadInput(
                f"expected as many as prefill_values ({len(prefill)})", field="len(decode_values)", value=len(decode)
            )
        object.__setattr__(self, "prefill_values", prefill)
        object.__setattr__(self, "decode_values", decode)

    def __len__(self) -> int:
        return len(self.prefill_values)

    @property
    def mean_prefill(self) -> float:
        return float(self.prefill_values.mean())

    @property
    def mean_decode(self) -> float:
        return float(self.decode_values.mean())

    @property
    def covariance(self) -> float:
        away = (self.prefill_values - self.mean_prefill) * (self.decode_values - self.mean_decode)
        return float(away.mean())

    @property
    def constant_decode(self) -> int | None:
        first = int(self.decode_values[0])
        return first if bool((self.decode_values == first).all()) else None

    @property
    def is_constant(self) -> bool:
        prompts_alike = bool((self.prefill_values == self.prefill_values[0]).all())
        return prompts_alike and self.constant_decode is not None

    def prefill_pmf(self) -> FloatArray:
        mass: FloatArray = np.bincount(self.prefill_values) / len(self)
        return mass

    def independent(self) -> Independent:
        """The same prompts and the same answers, drawn independently."""
        return Independent(Empirical(self.prefill_values), Empirical(self.decode_values))

    def sample(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        rows = rng.integers(0, len(self), whole(size, "size", low=0))
        return self.prefill_values[rows], self.decode_values[rows]

    def stream(self, rng: np.random.Generator) -> PairStream:
        return partial(self.sample, rng)

    def sample_resident(self, rng: np.random.Generator, size: int) -> tuple[IntArray, IntArray]:
        """Row i has the probability D_i / Σ D."""
        cumulative = np.cumsum(self.decode_values)
        rows = np.searchsorted(cumulative, rng.integers(0, cumulative[-1], size), side="right")
        return self.prefill_values[rows], self.decode_values[rows]

    def renewal_load(self) -> float:
        return float(self._token_steps().mean()) / self.mean_decode

    def renewal_load_interval(self, confidence: float = 0.95, *, block: int = 1) -> tuple[float, float]:
        """An interval (low, high) that holds the true θ with probability `confidence`, in tokens.

        θ is a ratio of two means, so by the delta method its error is that of the mean of (token steps - θ D), over
        E[D]. Requests of a real trace drift with the hour: give a `block` of consecutive rows long enough to forget,
        and the error comes from the differences between whole blocks. It is a little too short for a few dozen blocks,
        or under very heavy tails. `BadInput` for a confidence outside [0.001, 0.999999], and fewer than two blocks.
        """
        from statistics import NormalDist

        level = number(confidence, "confidence", low=1e-3, high=0.999999)
        blocks = len(self) // whole(block, "block", low=1)
        if blocks < 2:
            raise BadInput(f"expected at least 2 blocks in {len(self)} pairs", field="block", value=block)
        theta = self.renewal_load()
        residual = self._token_steps() - theta * self.decode_values
        means = residual[: blocks * block].reshape(blocks, block).mean(axis=1)
        error = float(means.std(ddof=1)) / (self.mean_decode * blocks**0.5)
        reach = NormalDist().inv_cdf((1.0 + level) / 2.0) * error
        return max(0.0, theta - reach), theta + reach

    def load_beyond(self, age: int) -> float:
        steps = np.maximum(self.decode_values - age, 0)
        loads = steps * (self.prefill_values + age + (steps - 1) / 2)
        return float(loads.mean()) / self.mean_decode

    def slot_load_pmf(self) -> FloatArray:
        """Exact: a pair adds one to each load P ... P + D - 1."""
        if max(self.prefill_values.max(), self.decode_values.max()) >= PMF_ENTRIES:
            raise _too_long("measured values")
        ends = self.prefill_values + self.decode_values
        size = int(ends.max())
        steps = np.bincount(self.prefill_values, minlength=size + 1) - np.bincount(ends, minlength=size + 1)
        load: FloatArray = np.cumsum(steps[:size]) / self.decode_values.sum()
        return load

    def _token_steps(self) -> FloatArray:
        """The loads of each pair summed over its steps: P D + D (D - 1) / 2, shape (n,)."""
        prefill, decode = self.prefill_values, self.decode_values
        return (prefill * decode + decode * (decode - 1) // 2).astype(np.float64)


LengthPairs: TypeAlias = Independent | JointEmpirical
"""A joint distribution of (prefill, decode) lengths in tokens, with decode >= 1."""


def _age_pmf(decode: FloatArray) -> FloatArray:
    """Probabilities P(D > i) / E[D] that a slot's request has decoded i tokens at a random step."""
    longer: FloatArray = np.cumsum(decode[::-1])[::-1][1:]
    longer /= longer.sum()
    return longer


def _convolve(first: FloatArray, second: FloatArray) -> FloatArray:
    size = len(first) + len(second) - 1
    padded = 1 << (size - 1).bit_length()
    spectrum = np.fft.rfft(first, padded) * np.fft.rfft(second, padded)
    mass: FloatArray = np.maximum(np.fft.irfft(spectrum, padded)[:size], 0.0)
    mass /= mass.sum()
    return mass


def _too_long(lengths: str) -> BadInput:
    return BadInput(
        f"expected lengths that a table of {PMF_ENTRIES} entries can hold, not {lengths}", field="slot load"
    )
