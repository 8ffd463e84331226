"""Attention over decodes of uneven lengths: α in t = t(mean) + α · (t(longest) - t(mean)), from the profiler's skew
shots.

A shot times n decodes of two lengths, beside n decodes of their mean length and n of the longer one. Only the ratio
α = (t_skew - t_mean) / (t_max - t_mean) is used. (In files of profiler 1.0 the three times are sums over the
iterations, three times those of the attention table.)

A batch is described by n, its mean and its longest history. α is a function of n and of the skewness s = (longest -
mean) / longest, for decodes alone and beside a prompt. At each measured n it is a median per interval of s, linear in
between, weighted to minimise the sum of relative errors of the time. The prompt's chunk and context, which the shots
vary too, did not improve predictions for held-out lengths; neither did the length itself.

Shots are of powers of two, and some of these have an α of their own, which no batch beside them shares: a kernel's
tiles end there. So each n's α is averaged with what its neighbours say of it, and shrunk by the share that makes the
neighbours' α predict the shots of that n best.

Shots have two lengths, batches a spread of them. At the same mean and longest history a spread is cheaper: the other
sequences end one after another and hide the tail of the longest. α therefore tends to be too large.
"""

from __future__ import annotations

from bisect import bisect_right
from math import log2
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from latency_models.calibration import as_tuples
from latency_models.fitting.estimator import Floats
from latency_models.io.config_io import Strict
from workloads.errors import BadInput

KNOTS = (0.1, 0.3, 0.45, 0.55, 0.65, 0.73)
"""Skewness values at which α is fitted, each to the shots nearest to it."""

MIN_SHOTS = 3
"""Shots that a median needs."""

MIN_SIZES = 3
"""Numbers of decodes from which each one's neighbours have a say."""


Alphas: TypeAlias = tuple[float, float, float, float, float, float]


class SkewLevels(Strict):
    """The values of α at `KNOTS`, for each measured number of decodes, rising."""

    n_decode: Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuples), Field(min_length=1)]
    alpha: Annotated[tuple[Alphas, ...], BeforeValidator(as_tuples)]

    @model_validator(mode="after")
    def _agrees(self) -> SkewLevels:
        if len(self.alpha) != len(self.n_decode):
            raise BadInput(f"expected a row for each n_decode ({len(self.n_decode)})", field="alpha")
        if list(self.n_decode) != sorted(set(self.n_decode)):
            raise BadInput("expected rising numbers", field="n_decode", value=list(self.n_decode))
        return self


class SkewFit(Strict):
    """The fitted α, and relative errors of times, each from a fit without the shots of the same `kvs`."""

    pure: SkewLevels | None = None
    mixed: SkewLevels | None = None
    shots: PositiveInt
    heldout_median_error: NonNegativeFloat | None = None
    heldout_p90_error: NonNegativeFloat | None = None
    uncorrected_median_error: NonNegativeFloat | None = None
    uncorrected_p90_error: NonNegativeFloat | None = None

    def alphas(self, regime: str, decodes: int) -> list[float]:
        """The values of α at `KNOTS` for a number of decodes: linear in its logarithm, constant outside the data."""
        return alphas_of(self.pure if regime == "pure" else self.mixed, decodes)


def alphas_of(levels: SkewLevels | None, decodes: int) -> list[float]:
    """The values of `SkewFit.alphas` for one regime."""
    if levels is None:
        return [0.0] * len(KNOTS)
    counts = levels.n_decode
    i = bisect_right(counts, decodes) - 1
    if i < 0 or i == len(counts) - 1:
        return list(levels.alpha[max(i, 0)])
    share = log2(decodes / counts[i]) / log2(counts[i + 1] / counts[i])
    return [a + (b - a) * share for a, b in zip(levels.alpha[i], levels.alpha[i + 1], strict=True)]


Shots: TypeAlias = "np.recarray[Any, Any]"
"""Columns of skew.csv, shape (n,)."""

SHOT: list[tuple[str, type]] = [
    ("mixed", bool), ("decodes", int), ("short", int), ("kv_mean", float), ("longest", float), ("at_mean", float),
    ("at_longest", float), ("time", float),
]  # fmt: skip
"""Fields of a shot: `short` is the shorter length, `kv_mean` and `longest` are histories, the last three times."""


def fit_skew(shots: Shots, *, errors: bool = False) -> SkewFit | None:
    """Fit α to shots; None where no history is above its mean. `errors`: with a further fit for each short length."""
    shots = shots[(shots.at_longest > shots.at_mean) & (shots.longest > shots.kv_mean)]
    if not len(shots):
        return None
    return SkewFit(
        pure=_levels(shots[~shots.mixed]),
        mixed=_levels(shots[shots.mixed]),
        shots=len(shots),
        **(_errors(shots) if errors else {}),
    )


def _skewness(shots: Shots) -> Floats:
    skewness: Floats = 1 - shots.kv_mean / shots.longest
    return skewness


def _errors(shots: Shots) -> dict[str, float]:
    predicted = np.array(shots.at_mean)
    for short in np.unique(shots.short):
        fold = shots.short == short
        training = shots[~fold]
        levels = {False: _levels(training[~training.mixed]), True: _levels(training[training.mixed])}
        predicted[fold] = _predict(shots[fold], levels)
    heldout = np.abs(predicted - shots.time) / shots.time
    uncorrected = np.abs(shots.at_mean - shots.time) / shots.time
    return {
        "heldout_median_error": float(np.median(heldout)),
        "heldout_p90_error": float(np.percentile(heldout, 90)),
        "uncorrected_median_error": float(np.median(uncorrected)),
        "uncorrected_p90_error": float(np.percentile(uncorrected, 90)),
    }


def _levels(shots: Shots) -> SkewLevels | None:
    if not len(shots):
        return None
    gap = shots.at_longest - shots.at_mean
    alpha, weight = (shots.time - shots.at_mean) / gap, gap / shots.time
    knots = np.array(KNOTS)
    nearest = np.abs(_skewness(shots)[:, None] - knots).argmin(axis=1)
    counts, rows = [], []
    for decodes in sorted(set(shots.decodes.tolist())):  # np.unique would load numpy.ma
        of_count = shots.decodes == decodes
        cells = [of_count & (nearest == knot) for knot in range(len(knots))]
        measured = [knot for knot, cell in enumerate(cells) if cell.sum() >= MIN_SHOTS]
        if measured:
            medians = [_weighted_median(alpha[cells[knot]], weight[cells[knot]]) for knot in measured]
            rows.append(tuple(np.interp(knots, knots[measured], medians).tolist()))
            counts.append(decodes)
    if not rows:
        return None
    levels = SkewLevels(n_decode=tuple(counts), alpha=tuple(rows))
    if len(counts) < MIN_SIZES:
        return levels
    return SkewLevels(n_decode=levels.n_decode, alpha=tuple(_smoothed(levels, shots, decodes) for decodes in counts))


def _smoothed(levels: SkewLevels, shots: Shots, decodes: int) -> Alphas:
    """α of one number of decodes: halfway between its own and its neighbours', shrunk by the share of least error."""
    i = levels.n_decode.index(decodes)
    counts, alpha = levels.n_decode, levels.alpha
    neighbours = SkewLevels(n_decode=counts[:i] + counts[i + 1 :], alpha=alpha[:i] + alpha[i + 1 :])
    expected = np.array(alphas_of(neighbours, decodes))
    selected = shots[shots.decodes == decodes]
    gap = selected.at_longest - selected.at_mean
    rise = np.interp(_skewness(selected), KNOTS, expected) * gap
    rising = np.abs(rise) > 0
    ratios = (selected.time - selected.at_mean)[rising] / rise[rising]
    share = _weighted_median(ratios, (np.abs(rise) / selected.time)[rising]) if rising.any() else 0.0
    row: Alphas = tuple((min(max(share, 0.0), 1.0) * (np.array(levels.alpha[i]) + expected) / 2).tolist())
    return row


def _weighted_median(values: Floats, weights: Floats) -> float:
    """The a that minimises Σ weight · |value - a|."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _predict(shots: Shots, levels: dict[bool, SkewLevels | None]) -> Floats:
    alpha = np.zeros(len(shots))
    for mixed, factors in levels.items():
        for decodes in np.unique(shots.decodes[shots.mixed == mixed]):
            rows = (shots.mixed == mixed) & (shots.decodes == decodes)
            alpha[rows] = np.interp(_skewness(shots)[rows], KNOTS, alphas_of(factors, int(decodes)))
    predicted: Floats = shots.at_mean + alpha * (shots.at_longest - shots.at_mean)
    return predicted
