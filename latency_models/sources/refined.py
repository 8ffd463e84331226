"""Source `refined`: step times of another source at what a short run has taught about their unknowns.

Before the run the scores of the unknowns are independent and standard normal. After it they have an estimate m and a
covariance P. With the symmetric root R of P, scores of this model stand for m + R z: independent again, each mostly of
the unknown whose name it has, and equal to the prior for what the run did not show. `twin calibrate refine` writes the
file, `twin.refined-step-time/1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.fitting.estimator import Floats
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import FilePath
from latency_models.sources.registry import SourceSpec, find_source, register
from latency_models.step_time import StepTime, Unknown
from latency_models.wrapped import ScaledStepTime
from workloads.errors import BadInput

SCHEMA: Literal["twin.refined-step-time/1"] = "twin.refined-step-time/1"


class RefinedFile(Strict):
    """The file `twin.refined-step-time/1`.

    `folder`: relative paths in `step_time` start from here; itself relative to this file. `estimate`, `covariance`: of
    the scores, in the order of `unknowns`. `drift`: deviation of a factor on all step times. `mean_factor`: mean steps
    over typical ones, which the scores describe.
    """

    schema_: Literal["twin.refined-step-time/1"] = Field(alias="schema")
    folder: str = "."
    step_time: dict[str, Any]
    unknowns: list[str]
    estimate: list[float]
    covariance: list[list[float]]
    drift: NonNegativeFloat
    mean_factor: PositiveFloat = 1.0
    evidence: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sizes_agree(self) -> RefinedFile:
        count = len(self.unknowns)
        if len(self.estimate) != count or {len(self.covariance), *map(len, self.covariance)} != {count}:
            raise ValueError(f"expected {count} scores, and {count} rows of {count} covariances")
        return self


def read_refined_file(path: Path) -> RefinedFile:
    return checked(RefinedFile, read_yaml(path), path)


DRIFT = "refined"
"""Name of the factor on all step times."""


class RefinedStepTime(ScaledStepTime):
    """Step times of a model whose unknowns `names` a run has narrowed to an estimate (n,) and covariance (n, n).

    `mean_factor`: see `RefinedFile`; with it, sums of durations are right where some steps stall.
    """

    def __init__(
        self,
        prior: StepTime,
        names: Sequence[str],
        estimate: Floats,
        covariance: Floats,
        drift: float,
        mean_factor: float = 1.0,
    ) -> None:
        self._mean_factor = mean_factor
        self._prior = prior
        self._names = tuple(names)
        self._drift = drift
        self._estimate = np.asarray(estimate, dtype=np.float64)
        values, vectors = np.linalg.eigh(np.asarray(covariance, dtype=np.float64))
        self._root: Floats = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        super().__init__(prior.vary(dict(zip(self._names, self._estimate.tolist(), strict=True))), mean_factor)

    @classmethod
    def from_file(cls, file: RefinedFile, prior: StepTime, path: Path) -> RefinedStepTime:
        names = {unknown.name for unknown in prior.unknowns()}
        for i, name in enumerate(file.unknowns):
            if name not in names:
                expected = f"expected an unknown of the section ({', '.join(sorted(names)) or 'it has none'})"
                raise BadInput(expected, field=f"unknowns[{i}]", value=name, file=path)
        covariance = np.array(file.covariance).reshape(len(file.unknowns), -1)
        if not np.allclose(covariance, covariance.T) or (np.linalg.eigvalsh(covariance) < -1e-9).any():
            raise BadInput("expected a symmetric matrix without negative eigenvalues", field="covariance", file=path)
        return cls(prior, file.unknowns, np.array(file.estimate), covariance, file.drift, file.mean_factor)

    def unknowns(self) -> tuple[Unknown, ...]:
        """Those of the prior model with what is left of their deviations, and the drift."""
        return self._known_unknowns

    @cached_property
    def _known_unknowns(self) -> tuple[Unknown, ...]:
        shares = dict(zip(self._names, np.sqrt((self._root @ self._root.T).diagonal()).tolist(), strict=True))
        narrowed = [
            self._narrowed(unknown, shares.get(unknown.name, 1.0))
            for unknown in self._prior.unknowns()
            if unknown.name != DRIFT  # of an earlier refinement, which the new drift contains
        ]
        if self._drift:
            narrowed.append(Unknown(DRIFT, "the engine since the run by which it was refined", "held out", self._drift,
                                 "a longer run of the engine"))  # fmt: skip
        return tuple(narrowed)

    @staticmethod
    def _narrowed(unknown: Unknown, share: float) -> Unknown:
        if share > 0.9:
            return unknown
        deviation = None if unknown.deviation is None else unknown.deviation * share
        return replace(unknown, basis="fitted", deviation=deviation)

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        log_factors = self._estimate + self._root @ np.array([scores.get(name, 0.0) for name in self._names])
        further = {name: score for name, score in scores.items() if name not in self._names and name != DRIFT}
        varied = self._prior.vary(dict(zip(self._names, log_factors.tolist(), strict=True)) | further)
        return ScaledStepTime(varied, self._mean_factor * float(np.exp(self._drift * scores.get(DRIFT, 0.0))))


@register
class RefinedSpec(SourceSpec):
    """Step times that a short run of the engine has corrected: `path` is the file of `twin calibrate refine`."""

    source: Literal["refined"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        path = base / self.path
        file = read_refined_file(path)
        name = str(file.step_time.get("source"))
        try:
            spec = find_source(name)
        except BadInput as error:
            raise BadInput(error.expected, field="step_time.source", value=name, file=path) from None
        section = checked(spec, file.step_time, path, "step_time")
        if isinstance(section, RefinedSpec) and (path.parent / file.folder / section.path).resolve() == path.resolve():
            raise BadInput("expected another file", field="step_time.path", value=section.path, file=path)
        return RefinedStepTime.from_file(file, section.build(path.parent / file.folder), path)
