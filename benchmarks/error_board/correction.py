"""Errors of predicted rows, learned from the errors of others: a Gaussian process whose levels are what rows share.

The error of a row, log(measured / predicted), is a sum over levels, from all rows to rows of one configuration. At each
level, rows that share it share an error of the whole, one that varies smoothly with the requests in flight and the
lengths, and a factor on each part of the predicted time (linear layers of decodes, experts of prompts, …), which counts
by the part's share of the row. So a row that nothing like it was measured of keeps the prediction from data sheets,
with a wide interval, and one between measured neighbours is corrected by them, with a narrow one.

What is left out of a fit is predicted by the rest. With K the covariance of all rows, and y their errors, the block g
of rows that are left out together has (Rasmussen and Williams 2006, section 5.4.2, for blocks)

    mean = y_g − [K⁻¹]_gg⁻¹ [K⁻¹ y]_g        covariance = [K⁻¹]_gg⁻¹

so that one factor serves many blocks. Rows whose error is unlike what other configurations predict count little for
others (`damped`). Nothing that is left out has a say in that: it is decided for each model, system, or tenth of the
configurations by the rows outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.error_board.prediction import Prediction, chip
from benchmarks.error_board.rows import Row
from latency_models.deployment.models import load_model
from latency_models.fitting.estimator import Floats
from latency_models.sources.roofline.spec import family

LENGTH = 1.5
"""Natural logarithms of requests in flight, and of lengths, over which an error changes."""

NEIGHBOURLY = 2.5
"""Deviations from its neighbours' prediction up to which a row counts fully."""

ASSUMED_ALIKE = ("engine", "cell")
"""Levels at which rows share what was assumed of them."""

LEVELS = ("all", "engine", "format", "family", "model", "served", "release", "cell", "configuration")


@dataclass(frozen=True, slots=True)
class Deviations:
    """Prior deviations of the logarithms of factors at one level: of the whole, of its smooth part, of each part."""

    whole: float
    smooth: float
    parts: float


@dataclass(frozen=True, slots=True)
class Prior:
    """Deviations by level, and of rows of one configuration around all of it.

    Attributes:
        assumed: what rows share whose workers are not stated, at each of ASSUMED_ALIKE; None: nothing.
    """

    levels: Mapping[str, Deviations]
    scatter: float
    assumed: Deviations | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: its row, what was predicted, and the measured error log(measured / predicted)."""

    row: Row
    prediction: Prediction
    error: float
    shares: Mapping[str, float]

    def level(self, name: str) -> str:
        """The name of a row's group at a level."""
        row = self.row
        chips = f"{row.engine} {chip(row.system)}"
        return {
            "all": "",
            "engine": row.engine,
            "format": f"{chips} {row.precision}",
            "family": f"{chips} {family(load_model(row.model))}",
            "model": row.model,
            "served": f"{row.engine} {row.model}",
            "release": f"{row.engine} {row.version} {row.model}",
            "cell": f"{row.engine} {row.model} {row.system} {row.precision}",
            "configuration": f"{row.engine} {row.model} {row.system} {row.precision} {row.layout}",
            "sizes": f"{row.engine} {row.model} {row.system} {row.precision} {row.sizes}",
            "system": row.system,
        }[name]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors that the rest predicts: log(measured / predicted) in the mean, and its deviation, of each case."""

    mean: Floats
    deviation: Floats


def left_out(cases: Sequence[Case], prior: Prior, groups: Sequence[str]) -> dict[str, LeftOut]:
    """Errors of each case, predicted by the cases that do not share a group with it; groups are levels, or `system`."""
    signal, errors = covariance(cases, prior), np.array([case.error for case in cases])
    noise = np.full(len(cases), prior.scatter**2)
    inverse = np.linalg.inv(signal + np.diag(noise))
    configurations = np.array([case.level("configuration") for case in cases])
    results = {}
    for group in groups:
        mean, variance = np.empty(len(cases)), np.empty(len(cases))
        for members in _folds([case.level(group) for case in cases]):
            inside = np.concatenate(members)
            weights = noise.copy()
            outside = np.setdiff1d(np.arange(len(cases)), inside)
            weights[outside] = _weights(inverse, errors, noise, inside, outside, configurations)
            mean[inside], variance[inside] = _predicted(signal + np.diag(weights), errors, members)
        results[group] = LeftOut(mean, np.sqrt(variance))
    return results


FOLDS = 10
"""Parts of many groups that are left out together where it is decided how much the rest counts."""


def _folds(names: Sequence[str]) -> list[list[NDArray[np.int64]]]:
    """Groups by the part that they are in: all alone if they are few."""
    members = _members(names)
    return [members[start::FOLDS] for start in range(FOLDS)] if len(members) > 2 * FOLDS else [[one] for one in members]


def _weights(
    inverse: Floats,
    errors: Floats,
    noise: Floats,
    inside: NDArray[np.int64],
    outside: NDArray[np.int64],
    configurations: NDArray[np.str_],
) -> Floats:
    """Noise of the cases outside a fold, damped by what those of other configurations outside predict."""
    across = inverse[np.ix_(outside, inside)]
    rest = inverse[np.ix_(outside, outside)] - across @ np.linalg.solve(inverse[np.ix_(inside, inside)], across.T)
    parts = _members(configurations[outside].tolist())
    first = _leave_out(rest, rest @ errors[outside], errors[outside], parts, noise[outside])
    return damped(noise[outside], errors[outside], first)


def _predicted(total: Floats, errors: Floats, members: Sequence[NDArray[np.int64]]) -> tuple[Floats, Floats]:
    """Means, and variances with a row's own noise, of groups, by all others; `total` is the covariance with noise."""
    from scipy.linalg import cho_factor, cho_solve  # slow to import, and only the board needs it

    inside = np.concatenate(members)
    factor = cho_factor(total, lower=True, overwrite_a=False, check_finite=False)
    units = np.zeros((len(errors), len(inside)))
    units[inside, np.arange(len(inside))] = 1.0
    columns = cho_solve(factor, units, overwrite_b=True, check_finite=False)
    weighted = cho_solve(factor, errors, check_finite=False)
    ends = np.cumsum([len(group) for group in members])
    parts = [np.arange(end - len(group), end) for group, end in zip(members, ends, strict=True)]
    return _leave_out(columns[inside], weighted[inside], errors[inside], parts, np.zeros(len(inside)))


def half_intervals(errors: Floats, deviation: Floats, groups: Sequence[str]) -> Floats:
    """Half of each row's 90 % interval: so many of its deviations as hold nine tenths of the rows outside its group.

    Args:
        errors: logarithms of predicted over measured, each with its group left out.
    """
    distance, names = np.abs(errors) / deviation, np.array(groups)
    half = np.empty(len(errors))
    for name in np.unique(names):
        inside = names == name
        half[inside] = deviation[inside] * np.quantile(distance[~inside], SHARE)
    return half


SHARE = 0.9
"""Share of rows that intervals are to hold."""


def damped(noise: Floats, errors: Floats, predicted: tuple[Floats, Floats]) -> Floats:
    """The noise of each row, larger where its error is unlike what its neighbours predict."""
    mean, variance = predicted
    distance = np.abs(errors - mean) / np.sqrt(variance + noise)
    wider: Floats = noise * np.maximum(distance / NEIGHBOURLY, 1.0) ** 3
    return wider


def covariance(cases: Sequence[Case], prior: Prior) -> Floats:
    """Prior covariance of the cases' errors, without their scatter, shape (n, n)."""
    names = sorted({part for case in cases for part in case.shares})
    shares = np.array([[case.shares.get(part, 0.0) for part in names] for case in cases])
    parts = shares @ shares.T
    size = np.log([[case.row.in_flight, case.row.isl / case.row.osl, case.row.isl + case.row.osl] for case in cases])
    squares = np.sum(size**2, axis=1)
    distance = squares[:, None] + squares[None, :] - 2 * size @ size.T
    smooth = np.exp(-0.5 * np.maximum(distance, 0.0) / LENGTH**2)
    total = np.zeros((len(cases), len(cases)))
    for level, deviations in prior.levels.items():
        _, names_of = np.unique([case.level(level) for case in cases], return_inverse=True)
        same = names_of[:, None] == names_of[None, :]
        total += np.where(same, _shared(deviations, smooth, parts), 0.0)
    if prior.assumed is not None:
        assumed = np.array([case.row.assumption.partition(" (")[0] for case in cases])
        for level in ASSUMED_ALIKE:
            names_of = np.array([case.level(level) for case in cases])
            same = (names_of[:, None] == names_of[None, :]) & (assumed[:, None] == assumed[None, :]) & (assumed != "")
            total += np.where(same, _shared(prior.assumed, smooth, parts), 0.0)
    return total


def _shared(deviations: Deviations, smooth: Floats, parts: Floats) -> Floats:
    """Covariance of rows that share a level."""
    shared: Floats = deviations.whole**2 + deviations.smooth**2 * smooth + deviations.parts**2 * parts
    return shared


def _members(names: Sequence[str]) -> list[NDArray[np.int64]]:
    _, at = np.unique(names, return_inverse=True)
    return [np.flatnonzero(at == group) for group in range(int(at.max()) + 1)]


def _leave_out(
    inverse: Floats, weighted: Floats, errors: Floats, groups: Sequence[NDArray[np.int64]], noise: Floats
) -> tuple[Floats, Floats]:
    """Means and variances, without `noise` of the row itself, of groups that are left out one after another.

    Args:
        weighted: K⁻¹ y of the same rows as `inverse`.
    """
    mean, variance = np.empty(len(errors)), np.empty(len(errors))
    for group in groups:
        block = np.linalg.inv(inverse[np.ix_(group, group)])
        mean[group] = errors[group] - block @ weighted[group]
        variance[group] = np.maximum(np.diag(block) - noise[group], 0.0)
    return mean, variance
