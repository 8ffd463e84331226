"""Lines of a calibration file from fitted estimators, and back."""

from __future__ import annotations

import math

import numpy as np

from latency_models.calibration.file_format import SIZES, Component, FitReport, Line
from latency_models.fitting.linear import LinearLatency


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


def to_estimator(line: Line) -> LinearLatency:
    """A line as an estimator for arrays. A line with a fit report has its intervals."""
    known = LinearLatency.from_coefficients(line.alpha, line.beta)
    report = line.fit
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
