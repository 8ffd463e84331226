"""The calibration file: α and β of attention, FFN and communication, with units and provenance, and its fit.

docs/reference/calibration-file.md describes every field.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from latency_models.fitting.estimator import CannotFit
from latency_models.fitting.linear import LinearLatency
from latency_models.io.config_io import Strict, checked, write_yaml
from latency_models.io.files import read_columns
from workloads.errors import BadInput

Component: TypeAlias = Literal["attention", "ffn", "communication"]
COMPONENTS: tuple[Component, ...] = ("attention", "ffn", "communication")

SIZES: dict[Component, tuple[str, ...]] = {
    "attention": ("token",),
    "ffn": ("request", "token"),
    "communication": ("request", "token"),
}
"""Units of sizes that a slope may be per. This project writes the first. A decode step has one token a request."""


def as_tuples(value: object) -> object:
    """Lists, also in lists, as tuples: of YAML, for strict fields."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def _a_date(value: object) -> object:
    """A date from text such as 2026-01-31. YAML reads it as a date, and as text if it is quoted."""
    try:
        return datetime.date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value


Pair: TypeAlias = Annotated[tuple[float, float], BeforeValidator(as_tuples)]
Date: TypeAlias = Annotated[datetime.date, BeforeValidator(_a_date)]
Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class FitReport(Strict):
    """Quality of a fitted line, in the calibration's units: enough to compute its prediction intervals again.

    `range` is the smallest and the largest measured size. The fields are those of `LinearLatency`.
    """

    points: Annotated[int, Field(ge=3)]
    range: Pair
    alpha_interval: Pair
    beta_interval: Pair
    confidence: Share = 0.95
    covariance: Annotated[tuple[Pair, Pair], BeforeValidator(as_tuples)]
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
            rows = [list(row) for row in self.covariance]
            raise BadInput("expected variances of at least 0 on the diagonal", field="covariance", value=rows)
        if self.degrees not in (self.points - 1, self.points - 2):
            expected = "expected points less 2, or less 1 through the origin"
            raise BadInput(expected, field="degrees", value=self.degrees)
        return self


class Line(Strict):
    """A line t = alpha·x + beta (eq. 2-4).

    x is the token load of an instance for attention, the requests at one FFN instance for the FFN, and the requests of
    one attention instance for communication, where t is the round trip.
    """

    alpha: NonNegativeFloat
    beta: NonNegativeFloat
    alpha_unit: str
    beta_unit: str
    fit: FitReport | None = None

    def seconds(self, size: float) -> float:
        """Time at one size, in the calibration's time unit (which may be cycles)."""
        return self.alpha * size + self.beta


class Provenance(Strict):
    """Origin of the figures. `method` is measured here, published by others, or derived from a roofline."""

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

    `scope` is what the lines describe: a whole decode step, or one transformer layer of `layers`.
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
        """The pair (α, β) of a whole decode step; those of a layer are multiplied by the number of layers."""
        line: Line = getattr(self, component)
        times = 1 if self.scope == "step" else self.layers
        assert times is not None
        return line.alpha * times, line.beta * times

    def content_hash(self) -> str:
        """16 hexadecimal digits that depend on every value in the file, but not on layout or comments."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Text of the file. Reading it gives an equal calibration."""
        return write_yaml(self.model_dump(by_alias=True, exclude_none=True))

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        partial = path.parent / f".{path.name}.{os.getpid()}"
        try:
            partial.write_text(self.to_yaml(), encoding="utf-8")
            partial.replace(path)
        except (OSError, ValueError) as error:  # the latter for a null byte in the path
            with contextlib.suppress(OSError, ValueError):
                partial.unlink()
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadInput(f"expected a file that can be written: {reason}", file=path) from None


def to_line(fitted: LinearLatency, component: Component, time_unit: str) -> Line:
    """A fitted estimator as a line of the calibration file, with its report."""
    error = fitted.heldout_median_error_
    names = ("points", "range", "alpha_interval", "beta_interval", "noise_variance", "degrees", "r_squared")
    report = FitReport(
        **{name: getattr(fitted, f"{name}_") for name in names},
        confidence=fitted.confidence,
        covariance=fitted.covariance_.tolist(),
        relative=fitted.relative,
        heldout_median_error=None if math.isnan(error) else error,
    )
    unit = f"{time_unit}/{SIZES[component][0]}"
    return Line(alpha=fitted.alpha_, beta=fitted.beta_, alpha_unit=unit, beta_unit=time_unit, fit=report)


Measurements = dict[Component, tuple[list[float], list[float]]]


def read_measurements(path: Path) -> Measurements:
    """Sizes and times of each component from a CSV with the columns component, size, time."""
    columns = read_columns(path)
    table: Measurements = {name: ([], []) for name in COMPONENTS}
    names, rows = columns.text("component"), zip(columns.numbers("size"), columns.numbers("time"), strict=True)
    for at, (name, (size, time)) in enumerate(zip(names, rows, strict=True)):
        if name not in COMPONENTS:
            raise columns.fault(f"expected one of {', '.join(COMPONENTS)}", at, "component")
        table[name][0].append(size)
        table[name][1].append(time)
    return table


def fit_calibration(
    measurements: Measurements,
    *,
    name: str,
    device: str,
    model: str,
    time_unit: str = "seconds",
    layers: int | None = None,
    relative: bool = False,
    source: str = "",
) -> Calibration:
    """Fit a line to every component, and report the quality of each fit."""
    lines: dict[str, Line] = {}
    for component in COMPONENTS:
        try:
            fitted = LinearLatency(relative=relative).fit(*measurements[component])
        except CannotFit as error:
            field = f"{component}.{error.field}"
            raise BadInput(error.expected, value=error.value, field=field, file=source or None) from None
        lines[component] = to_line(fitted, component, time_unit)
    document: dict[str, Any] = {
        "schema": "twin.calibration/1",
        "name": name,
        "time_unit": time_unit,
        "scope": "step" if layers is None else "layer",
        "layers": layers,
        **lines,
        "provenance": Provenance(method="measured", source=source, device=device, model=model),
    }
    return checked(Calibration, document, None)
