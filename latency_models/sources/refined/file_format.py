"""The file `twin.refined-step-time/1`: a step-time section, and what a run has taught about its unknowns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from latency_models.io.config_io import Strict, checked, read_yaml

SCHEMA: Literal["twin.refined-step-time/1"] = "twin.refined-step-time/1"


class RefinedFile(Strict):
    """The file `twin.refined-step-time/1`.

    Attributes:
        folder: relative paths in `step_time` start from here; itself relative to this file.
        step_time: the section that was refined.
        unknowns: their names. estimate: their scores, in that order. covariance: of the scores. Before the run scores
            have an estimate of 0 and the identity as covariance.
        drift: deviation of a factor on all step times, from the requests that entered no fit.
        evidence: the run, what it was fitted to, and its errors, for the record.
    """

    schema_: Literal["twin.refined-step-time/1"] = Field(alias="schema")
    folder: str = "."
    step_time: dict[str, Any]
    unknowns: list[str]
    estimate: list[float]
    covariance: list[list[float]]
    drift: NonNegativeFloat
    evidence: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sizes_agree(self) -> RefinedFile:
        count = len(self.unknowns)
        if len(self.estimate) != count or {len(self.covariance), *map(len, self.covariance)} != {count}:
            raise ValueError(f"expected {count} scores, and {count} rows of {count} covariances")
        return self


def read_refined_file(path: Path) -> RefinedFile:
    """Read and check a file."""
    return checked(RefinedFile, read_yaml(path), path)
