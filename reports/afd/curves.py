"""Throughput of a ratio sweep per instance or per card, `unit`: what figures and pages draw."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def curve_per_unit(configuration: Document, name: str, unit: str) -> list[float]:
    """A theory's curve; those of the document are per instance."""
    curves, cards = configuration["curves"], configuration["cards"]
    if unit == "instance":
        return list(curves[name])
    pairs = zip(curves["ratio"], curves[name], strict=True)
    return [rate * (ratio + 1) / (ratio * cards["attention"] + cards["ffn"]) for ratio, rate in pairs]


def rate_per_unit(point: Document, unit: str) -> float:
    """Steady throughput, or that of eq. 21 if there is none."""
    steady = point[f"throughput_per_{unit}_steady"]
    return float(point[f"throughput_per_{unit}"] if steady is None else steady)


def interval_per_unit(point: Document, unit: str) -> tuple[float, float]:
    """The 95 % interval of the steady throughput; without a steady state, the rate itself twice."""
    rate, steady = rate_per_unit(point, unit), point["throughput_per_instance_steady"]
    if steady is None:
        return rate, rate
    low, high = (float(end) * rate / float(steady) for end in point["throughput_ci"])
    return low, high
