"""Calibration lines from fitted estimators, and back; a calibration fitted to a table of measured times."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from latency_models.calibration.file_format import (
    COMPONENTS,
    SIZES,
    Calibration,
    Component,
    FitReport,
    Line,
    Provenance,
)
from latency_models.fitting.linear import CannotFit, LinearLatency
from latency_models.io.config_io import checked
from latency_models.io.tables import read_columns
from workloads.errors import BadInput


def to_line(fitted: LinearLatency, component: Component, time_unit: str) -> Line:
    """A fitted estimator as a line of the calibration file, with its report."""
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
