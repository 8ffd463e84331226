"""The calibration file: α and β of attention, FFN and communication, their units, and where they came from.

Every field is described in docs/reference/calibration-file.md.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from latency_models.builtin import builtin_names, find_data
from latency_models.strict import Strict, checked, read_yaml, write_yaml
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.linear import LinearLatency

Component: TypeAlias = Literal["attention", "ffn", "communication"]
COMPONENTS: tuple[Component, ...] = ("attention", "ffn", "communication")

SIZES: dict[Component, tuple[str, ...]] = {
    "attention": ("token",),
    "ffn": ("request", "token"),
    "communication": ("request", "token"),
}
"""What a slope may be per; the first is how this project writes it. A decode step has one token a request."""


def _a_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _a_date(value: object) -> object:
    """YAML makes a date of 2026-01-31; in quotes it stays text."""
    try:
        return datetime.date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value


Pair: TypeAlias = Annotated[tuple[float, float], BeforeValidator(_a_list)]
Date: TypeAlias = Annotated[datetime.date, BeforeValidator(_a_date)]
Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class FitReport(Strict):
    """How well a fitted line holds, as `LinearLatency` found it; enough to give its prediction intervals again.

    In the calibration's units. `range` is of the sizes that were measured.
    """

    points: Annotated[int, Field(ge=3)]
    range: Pair
    alpha_interval: Pair
    beta_interval: Pair
    confidence: Share = 0.95
    covariance: Annotated[tuple[Pair, Pair], BeforeValidator(_a_list)]
    noise_variance: NonNegativeFloat
    degrees: PositiveInt
    relative: bool = False
    r_squared: Annotated[float, Field(le=1)]
    heldout_median_error: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _agrees(self) -> FitReport:
        for name in ("range", "alpha_interval", "beta_interval"):
            low, high = getattr(self, name)
            if low > high:
                raise BadInput("expected the lower end first", field=name, value=[low, high])
        if min(self.covariance[0][0], self.covariance[1][1]) < 0:
            found = [list(row) for row in self.covariance]
            raise BadInput("expected variances of at least 0 on the diagonal", field="covariance", value=found)
        if self.degrees not in (self.points - 1, self.points - 2):
            expected = "expected points less 2, or less 1 through the origin"
            raise BadInput(expected, field="degrees", value=self.degrees)
        return self


class Line(Strict):
    """t = alpha·x + beta. Attention: x is the token load of an instance. FFN: requests at one FFN instance.

    Communication: x is the requests of one attention instance, t the round trip (eq. 2-4).
    """

    alpha: NonNegativeFloat
    beta: NonNegativeFloat
    alpha_unit: str
    beta_unit: str
    fit: FitReport | None = None

    @classmethod
    def from_estimator(cls, fitted: LinearLatency, component: Component, time_unit: str) -> Line:
        """The line of a fitted estimator, with its report."""
        error = fitted.heldout_median_error_
        report = FitReport(
            points=fitted.points_,
            range=fitted.range_,
            alpha_interval=fitted.alpha_interval_,
            beta_interval=fitted.beta_interval_,
            confidence=fitted.confidence,
            covariance=fitted.covariance_.tolist(),
            noise_variance=fitted.noise_variance_,
            degrees=fitted.degrees_,
            relative=fitted.relative,
            r_squared=fitted.r_squared_,
            heldout_median_error=None if math.isnan(error) else error,
        )
        unit = f"{time_unit}/{SIZES[component][0]}"
        return cls(alpha=fitted.alpha_, beta=fitted.beta_, alpha_unit=unit, beta_unit=time_unit, fit=report)

    def seconds(self, size: float) -> float:
        """The line at one size, in the calibration's time unit (which may be cycles)."""
        return self.alpha * size + self.beta

    def in_range(self, size: float) -> bool:
        """Whether the size was within what was measured; without a fit, whether it is a size at all."""
        low, high = (0.0, math.inf) if self.fit is None else self.fit.range
        return low <= size <= high

    def estimator(self) -> LinearLatency:
        """The line as an estimator, for arrays and, where it was fitted, with the intervals of that fit."""
        import numpy as np  # here, so that who only reads a calibration waits for neither

        from latency_models.linear import LinearLatency

        known = LinearLatency.from_coefficients(self.alpha, self.beta)
        report = self.fit
        if report is None:
            return known
        known.set_params(relative=report.relative, confidence=report.confidence)
        known.covariance_, known.noise_variance_ = np.array(report.covariance), report.noise_variance
        known.degrees_, known.through_origin_ = report.degrees, report.degrees == report.points - 1
        known.alpha_interval_, known.beta_interval_ = report.alpha_interval, report.beta_interval
        known.range_, known.points_, known.r_squared_ = report.range, report.points, report.r_squared
        error = report.heldout_median_error
        known.heldout_median_error_ = math.nan if error is None else error
        return known


class Provenance(Strict):
    """Where the figures came from. `method` is how: measured here, published by others, or derived from a roofline."""

    method: Literal["measured", "published", "roofline"]
    source: str
    device: str
    model: str
    date: Date | None = None
    commit: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    note: str = ""


class Calibration(Strict):
    """One calibration file.

    `scope` says what the lines describe: a whole decode step, or one transformer layer of `layers`.
    """

    schema_: Literal["twin.calibration/1"] = Field(alias="schema")
    name: Annotated[str, Field(min_length=1)]
    time_unit: Literal["seconds", "cycles"]
    scope: Literal["step", "layer"]
    layers: PositiveInt | None = None
    attention: Line
    ffn: Line
    communication: Line
    provenance: Provenance

    @model_validator(mode="after")
    def _agrees(self) -> Calibration:
        if self.scope == "layer" and self.layers is None:
            raise BadInput("expected the number of layers in a step, since scope is layer", field="layers")
        for name in COMPONENTS:
            line: Line = getattr(self, name)
            slopes = [f"{self.time_unit}/{size}" for size in SIZES[name]]
            if line.alpha_unit not in slopes:
                raise BadInput(
                    f"expected {' or '.join(slopes)}, since time_unit is {self.time_unit}",
                    field=f"{name}.alpha_unit",
                    value=line.alpha_unit,
                )
            if line.beta_unit != self.time_unit:
                raise BadInput(
                    f"expected {self.time_unit}, the time_unit", field=f"{name}.beta_unit", value=line.beta_unit
                )
        return self

    def step_line(self, component: Component) -> tuple[float, float]:
        """(α, β) of a whole decode step: a layer's, times the layers."""
        line: Line = getattr(self, component)
        times = 1 if self.scope == "step" else self.layers
        assert times is not None
        return line.alpha * times, line.beta * times

    def content_hash(self) -> str:
        """16 hexadecimal digits that change with any value in the file, and not with its layout or comments."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The file's text. Reading it gives an equal calibration."""
        return write_yaml(self.model_dump(by_alias=True, exclude_none=True))

    def save(self, path: Path) -> None:
        """Write the file; it is whole or not there.

        Raises:
            BadInput: the folder is not there, or may not be written to.
        """
        partial = path.parent / f".{path.name}.{os.getpid()}"
        try:
            partial.write_text(self.to_yaml(), encoding="utf-8")
            partial.replace(path)
        except (OSError, ValueError) as error:  # the latter for a null byte in the path
            with contextlib.suppress(OSError, ValueError):
                partial.unlink()
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadInput(f"expected a file that can be written: {reason}", file=path) from None


def load_calibration(name: str | Path, base: Path = Path()) -> Calibration:
    """A built-in calibration by its name, or a file; relative paths start from `base`.

    Of a file that `twin calibrate run` wrote, its lines.

    Raises:
        BadInput: neither, or a file that breaks the schema.
    """
    path = find_data("calibrations", name, base)
    document = read_yaml(path)
    if document.get("schema") == "twin.measured-calibration/1":
        from latency_models.measured_calibration import from_document  # which is made of these classes

        return from_document(document, path).lines()
    return checked(Calibration, document, path)


def builtin_calibrations() -> list[str]:
    """Names of the calibrations that come with the package."""
    return builtin_names("calibrations")
