"""Durations of the roles of a bundle: recorded ones, and ones drawn from a fit to recorded ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from latency_models.fitting.estimator import CannotFit
from twin.afd.role_bundle import FEATURES, Stretch

Floats = NDArray[np.float64]

STEP_END = "coordinator.collect"
"""The kind of stretch with which each step of a microbatch ends."""

UNSCATTERED = (1.0,)

ROUNDS = 3
"""Rounds of reweighting: the error of a stretch counts relative to the fitted duration."""


class Part(NamedTuple):
    """A part of a recording: the attention instances of its bundle, and its number among parts with as many."""

    instances: int
    number: int


class TimedStretch(NamedTuple):
    """A recorded stretch: whose it was, its kind and features, and its seconds."""

    rank: int
    kind: str
    features: tuple[float, ...]
    seconds: float


class RecordedWork:
    """The stretches of a live run by rank, in the order in which each role did them, as `RoleWork`."""

    def __init__(self, work: Mapping[int, Sequence[float]]) -> None:
        self._work = work
        self._next = dict.fromkeys(work, 0)
        self.timed: list[TimedStretch] = []

    def seconds(self, rank: int, stretch: Stretch) -> float:
        begin = self._next[rank]
        self._next[rank] = end = begin + 1 + stretch.readings
        parts = self._work[rank][begin:end]
        if len(parts) < end - begin:
            raise ValueError(f"rank {rank}: {stretch.kind} was not recorded")
        seconds = sum(parts)
        self.timed.append(TimedStretch(rank, stretch.kind, stretch.features, seconds))
        return seconds


Round: TypeAlias = dict[tuple[int, str], list[float]]
"""Recorded over fitted seconds, by rank and kind, while each microbatch ends one step."""


class RoleTimes:
    """Lines through recorded stretches, with their scatter: `fit` sets, by kind, non-negative `coefficients_`,

    recorded over fitted seconds by number of instances (`ratios_`), and these by whole round (`rounds_`).
    """

    coefficients_: dict[str, Floats]
    ratios_: dict[str, dict[int, Floats]]
    rounds_: dict[Part, list[Round]]

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches

    def fit(self, recorded: Mapping[Part, Sequence[TimedStretch]]) -> RoleTimes:
        by_kind: dict[str, list[TimedStretch]] = defaultdict(list)
        for stretches in recorded.values():
            for stretch in stretches:
                by_kind[stretch.kind].append(stretch)
        several = any(part.instances > 1 for part in recorded)
        expected = [kind for kind in FEATURES if several or not kind.endswith((".receive", ".send"))]
        if missing := [kind for kind in expected if kind not in by_kind]:
            raise CannotFit(f"expected recorded stretches of kind {missing[0]}", field="profiling")
        self.coefficients_ = {
            kind: _relative_nnls(_design([row.features for row in rows]), np.array([row.seconds for row in rows]))
            for kind, rows in by_kind.items()
        }
        ratios: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.rounds_ = {}
        for part, stretches in recorded.items():
            rounds = self.rounds_[part] = self._rounds(stretches)
            if not rounds:
                raise CannotFit(f"expected more requests: {part.instances}A-1F ends no round", field="profiling")
            for stretch in stretches:
                ratios[stretch.kind][part.instances].append(self._ratio(stretch))
        self.ratios_ = {
            kind: {x: np.array(values) for x, values in by_instances.items()} for kind, by_instances in ratios.items()
        }
        return self

    def mean(self, kind: str, features: Iterable[float]) -> float:
        """Mean seconds of a stretch, over all parts; 0 for a kind that bundles of one instance do not have."""
        if kind not in self.coefficients_:
            return 0.0
        level = float(np.concatenate(list(self.ratios_[kind].values())).mean())
        return level * float(self.coefficients_[kind] @ np.array([1.0, *features]))

    def document(self) -> dict[str, Any]:
        """The lines as plain values: seconds by feature, and level and spread by ratio."""
        return {
            kind: {
                "seconds": dict(zip(("constant", *FEATURES[kind]), coefficients.tolist(), strict=True)),
                "level": {str(x): float(ratios.mean()) for x, ratios in self.ratios_[kind].items()},
                "spread": {str(x): float(ratios.std()) for x, ratios in self.ratios_[kind].items()},
                "stretches": sum(map(len, self.ratios_[kind].values())),
            }
            for kind, coefficients in self.coefficients_.items()
        }

    def _rounds(self, stretches: Sequence[TimedStretch]) -> list[Round]:
        """The ratios of each whole round, without the first, which is not yet regular."""
        rounds: list[Round] = [{}]
        ends = 0
        for stretch in stretches:
            rounds[-1].setdefault((stretch.rank, stretch.kind), []).append(self._ratio(stretch))
            ends += stretch.kind == STEP_END
            if stretch.kind == STEP_END and ends % self.microbatches == 0:
                rounds.append({})
        return rounds[1:-1]

    def _ratio(self, stretch: TimedStretch) -> float:
        constant, *slopes = self.coefficients_[stretch.kind]
        return float(stretch.seconds / (constant + sum(map(mul, slopes, stretch.features))))


class SampledWork:
    """Durations from fitted lines and the scatter of a part, as `RoleWork`.

    What slows one stretch slows its neighbours too. An FFN waits for the slowest instance, which independent draws
    would make too slow. So the scatter keeps the order of its recording, but begins at another place of it (`begin`).
    """

    def __init__(self, times: RoleTimes, part: Part, begin: float) -> None:
        self._lines = {kind: line.tolist() for kind, line in times.coefficients_.items()}
        self._rounds = times.rounds_[part]
        self._microbatches = times.microbatches
        self._begin = int(begin * len(self._rounds))
        self._ends = 0
        self._round = self._rounds[self._begin]
        self._next: dict[tuple[int, str], int] = {}

    def seconds(self, rank: int, stretch: Stretch) -> float:
        key = rank, stretch.kind
        scatter = self._round.get(key, UNSCATTERED)
        place = self._next.get(key, 0)
        self._next[key] = place + 1
        seconds, *slopes = self._lines[stretch.kind]
        for slope, feature in zip(slopes, stretch.features, strict=True):
            seconds += slope * feature
        if stretch.kind == STEP_END:
            self._ends += 1
            if self._ends % self._microbatches == 0:
                rounds = self._ends // self._microbatches
                self._round = self._rounds[(self._begin + rounds) % len(self._rounds)]
                self._next = {}
        return float(seconds * scatter[place % len(scatter)])


def _design(features: Sequence[tuple[float, ...]]) -> Floats:
    """The features with a first column of ones, shape (stretches, 1 + features)."""
    rows = np.array(features, dtype=np.float64).reshape(len(features), -1)
    return np.column_stack([np.ones(len(rows)), rows])


def _relative_nnls(design: Floats, seconds: Floats) -> Floats:
    weights = np.full(len(seconds), 1 / seconds.mean())
    scale = design.max(axis=0)
    scale[scale == 0] = 1.0
    for _ in range(ROUNDS):
        coefficients: Floats = nnls(design / scale * weights[:, None], seconds * weights)[0] / scale
        weights = 1 / np.maximum(design @ coefficients, 1e-3 * seconds.mean())
    return coefficients
