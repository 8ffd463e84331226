"""Intervals of forecasts: what they contain, and what they count."""

from __future__ import annotations

import numpy as np
import pytest

from twin.validation.compare import coverage, forecast_intervals


def summaries(values: list[float]) -> list[dict[str, object]]:
    return [{"ttft": {"mean": value}, "output_throughput": 100.0} for value in values]


def test_measured_values_are_counted_around_the_forecasts_of_their_own_requests() -> None:
    """Repeats differ by 30 %, the model by 2 %: only the second measured value is outside, though near the others."""
    predicted, measured = summaries([1.0, 1.3, 1.6]), summaries([1.01, 1.0, 1.62])
    draws = summaries(np.exp(0.02 * np.random.default_rng(0).standard_normal(10)).tolist())
    entry = forecast_intervals(measured, predicted, draws)["ttft.mean"]
    assert entry["inside"] == 2
    assert entry["parts"]["model"] == pytest.approx(0.02, rel=0.5)
    assert entry["parts"]["sampling"] == pytest.approx(np.log([1.0, 1.3, 1.6]).std(ddof=1))
    low, high = entry["forecast_interval"]
    assert low < 1.0 < 1.6 < high


def test_without_draws_the_models_part_is_unknown() -> None:
    intervals = forecast_intervals(summaries([1.0, 1.1]), summaries([1.0, 1.2]), [])
    assert intervals["ttft.mean"]["inside"] is None
    assert intervals["ttft.mean"]["parts"]["model"] is None
    assert coverage([{"metrics": intervals, "measured": [1, 2]}], ["ttft.mean"]) is None


def test_coverage_is_over_loads_and_repeats() -> None:
    loads = [
        {"metrics": {"ttft.mean": {"inside": 2}, "tpot.mean": {"inside": None}}, "measured": [0, 0, 0]},
        {"metrics": {"ttft.mean": {"inside": 1}}, "measured": [0, 0]},
    ]
    assert coverage(loads, ["ttft.mean", "tpot.mean", "e2e.mean"]) == {"inside": 3, "values": 5}
