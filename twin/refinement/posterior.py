"""Unknowns estimated from measured durations: the most likely scores, what is left open, and what cannot be told apart.

Scores s are standard normal before the run. The measured durations y are lognormal around the predicted f(s), so

    s = argmin (y - f(s))ᵀ Σ⁻¹ (y - f(s)) + sᵀs,    P = (JᵀΣ⁻¹J + 1)⁻¹

in logarithms, by Gauss and Newton's method. Two requests that were served at the same time saw the same disturbances:
their residuals are as alike as their intervals overlap. Without that, sixty requests of one minute would count as sixty
independent witnesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Linearise = Callable[[Floats], tuple[Floats, Floats]]
"""Logarithms of the predicted durations, shape (m,), at scores, shape (n,); and their derivatives, shape (m, n)."""

ROUNDS, SHORTENED, AVERAGED = 8, 0.6, 4
"""Gauss-Newton steps at most; their length from the second on; points at the end of the search that are averaged."""

CLOSE = 0.03
"""A step of fewer scores ends the search."""

LEARNED = 0.5
"""A deviation below this share of the prior's is learned."""

VISIBLE = 0.6
"""So small a share would be left of an unknown's deviation if it were the only one, where the run shows it at all."""


@dataclass(frozen=True, eq=False)
class Observations:
    """Logarithms of measured durations, (m,), their kinds, which differ in noise, and intervals on one clock.

    `floor`: deviation of each that no model can explain, such as the phase of a step.
    """

    measured: Floats
    kinds: NDArray[np.int64]
    begin: Floats
    end: Floats
    floor: Floats

    def where(self, rows: NDArray[np.bool_]) -> Observations:
        """The durations that a mask of shape (m,) selects."""
        return Observations(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True, eq=False)
class Posterior:
    """Scores after the run: `estimate`, (n,), and `covariance`, (n, n). `rounds`: Gauss-Newton steps.

    `information`: JᵀΣ⁻¹J, the data's alone, (n, n). `noise`: for each kind (deviation, share of it that overlapping
    intervals have in common).
    """

    estimate: Floats
    covariance: Floats
    information: Floats
    noise: dict[int, tuple[float, float]]
    rounds: int

    @property
    def left(self) -> Floats:
        """Deviations after the run, as shares of those before it; shape (n,)."""
        return np.sqrt(self.covariance.diagonal())

    @property
    def alone(self) -> Floats:
        """Deviations of each that would be left, if the others were known; shape (n,)."""
        return 1 / np.sqrt(1 + self.information.diagonal())

    def tied(self, i: int) -> list[int]:
        """Unknowns that the run cannot tell from unknown `i`: it shows the effect of `i`, but others have the same.

        The most alike come first. Empty if `i` was learned, or was not to be seen in the run.
        """
        if self.left[i] <= LEARNED or self.alone[i] > VISIBLE:
            return []
        likeness = np.abs(self.covariance[i] / (self.left[i] * self.left))
        likeness[i] = 0.0
        order = np.argsort(-likeness)
        return [int(j) for j in order if likeness[j] > max(0.3, 0.5 * likeness.max()) and self.alone[j] <= VISIBLE]

    def verdict(self, i: int) -> str:
        """`learned`, `tied` (with others) or `not seen`."""
        if self.left[i] <= LEARNED:
            return "learned"
        return "tied" if self.alone[i] <= VISIBLE else "not seen"


def estimate(observed: Observations, linearise: Linearise, count: int) -> Posterior:
    """Scores of `count` unknowns from durations.

    Simulated durations jump where a step more or less comes before an event. So steps are not judged by whether the
    residuals became smaller, but shortened, and the last `AVERAGED` points are averaged.
    """
    scores = np.zeros(count)
    alike = _overlaps(observed)
    path: list[Floats] = []
    rounds = 0
    for rounds in range(1, ROUNDS + 1):
        aim = _solve(observed, *linearise(scores), scores, alike).estimate
        shift = aim - scores
        scores = scores + (1.0 if rounds == 1 else SHORTENED) * shift
        path.append(scores)
        if np.abs(shift).max() < CLOSE:
            break
    else:
        scores = np.mean(path[-AVERAGED:], axis=0)
    solution = _solve(observed, *linearise(scores), scores, alike)
    return Posterior(scores, solution.covariance, solution.information, solution.noise, rounds)


def unlearned(posterior: Posterior) -> Posterior:
    """The scores before the run, with what it would have told."""
    count = len(posterior.estimate)
    return replace(posterior, estimate=np.zeros(count), covariance=np.eye(count))


def _solve(observed: Observations, predicted: Floats, jacobian: Floats, scores: Floats, alike: Floats) -> Posterior:
    """The posterior of the model that is linear around `scores`."""
    residuals = observed.measured - predicted + jacobian @ scores
    noise = fit_noise(observed, residuals, jacobian, alike)
    weighted = np.linalg.solve(_covariance(observed, noise, alike), jacobian)
    information = jacobian.T @ weighted
    covariance = np.linalg.inv(information + np.eye(len(scores)))
    covariance = (covariance + covariance.T) / 2
    return Posterior(covariance @ weighted.T @ residuals, covariance, information, noise, 0)


def _overlaps(observed: Observations) -> Floats:
    """Shares of intervals in common, |A ∩ B| / √(|A| |B|), between observations of one kind; shape (m, m)."""
    begin, end = observed.begin, np.maximum(observed.end, observed.begin + 1e-9)
    common = np.maximum(np.minimum.outer(end, end) - np.maximum.outer(begin, begin), 0.0)
    share: Floats = common / np.sqrt(np.outer(end - begin, end - begin))
    share[np.not_equal.outer(observed.kinds, observed.kinds)] = 0.0
    return share


def _covariance(observed: Observations, noise: dict[int, tuple[float, float]], alike: Floats) -> Floats:
    matrix = np.zeros_like(alike)
    for kind, (deviation, shared) in noise.items():
        rows = np.flatnonzero(observed.kinds == kind)
        block = shared * alike[np.ix_(rows, rows)]
        block[np.diag_indices_from(block)] = 1.0
        matrix[np.ix_(rows, rows)] = deviation**2 * block
    matrix[np.diag_indices_from(matrix)] += observed.floor**2
    return matrix


DEVIATIONS: Sequence[float] = tuple(np.geomspace(0.002, 0.5, 23).tolist())
SHARES: Sequence[float] = (0.0, 0.3, 0.6, 0.8, 0.9, 0.96)
SAMPLE = 300
"""Observations of a kind that noise is estimated from: evenly spaced ones of more."""


def fit_noise(
    observed: Observations, residuals: Floats, jacobian: Floats, alike: Floats
) -> dict[int, tuple[float, float]]:
    """Deviation and common share of each kind's noise: means of its logarithm, and of it, weighted by likelihood.

    `residuals`: at the estimates before the run, to first order. They contain what the unknowns explain, whose
    covariance is JJᵀ; a bias that an unknown may have is not taken for noise.
    """
    noise = {}
    for kind in np.unique(observed.kinds).tolist():
        rows = np.flatnonzero(observed.kinds == kind)
        rows = rows[:: max(len(rows) // SAMPLE, 1)]
        block, residual = alike[np.ix_(rows, rows)], residuals[rows]
        explained = jacobian[rows] @ jacobian[rows].T + np.diag(observed.floor[rows] ** 2 + 1e-12)
        grid: list[tuple[float, float, float]] = []
        for shared in SHARES:
            mixed = shared * block
            mixed[np.diag_indices_from(mixed)] = 1.0
            for deviation in DEVIATIONS:
                factor = np.linalg.cholesky(deviation**2 * mixed + explained)
                whitened = np.linalg.solve(factor, residual)
                likelihood = -0.5 * float(whitened @ whitened) - float(np.log(factor.diagonal()).sum())
                grid.append((likelihood, deviation, shared))
        likelihoods, deviations, shares = np.array(grid).T
        weights = np.exp(likelihoods - likelihoods.max())
        weights /= weights.sum()
        noise[kind] = (float(np.exp(weights @ np.log(deviations))), float(weights @ shares))
    return noise


BLOCKS = 20
"""Successive observations are left out together in at most this many blocks, since neighbours share disturbances."""


def log_mean_factor(measured: Floats, predicted: Floats) -> tuple[float, float]:
    """Logarithm of the factor from typical durations, as a fit of logarithms predicts them, to means; its deviation.

    It is the mean of the residuals' exponentials over that of a typical one (Duan 1983, "Smearing estimate: a
    nonparametric retransformation method"), at least 1. What is left between the measured and the predicted mean then
    is a level that the fit has missed; it counts as far as it is beyond the ratio's deviation (James and Stein's
    positive part), a jackknife's over blocks. Durations are in order, shape (m,), m ≥ 1.
    """
    level = float(predicted @ np.log(measured / predicted) / predicted.sum())
    ratio = float(np.log(measured.sum() / predicted.sum()))
    blocks = np.array_split(np.stack([measured, predicted]), min(BLOCKS, len(measured)), axis=1)
    sums = np.array([block.sum(axis=1) for block in blocks])
    without = np.log(np.divide(*(sums.sum(axis=0) - sums).T)) if len(sums) > 1 else np.zeros(1)
    deviation = float(np.sqrt((len(sums) - 1) * without.var()))
    missed = level * max(1 - (deviation / level) ** 2, 0.0) if level else 0.0
    return ratio - level + missed, deviation
