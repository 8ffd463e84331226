"""Intervals from several runs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from twin.serving.results.uncertainty import combine, sensitivities, with_width


def test_replications_alone_are_students_t() -> None:
    values = [3.0, 4.5, 2.5, 5.0]
    mean, intervals = combine([{"ttft": {"mean": value}, "requests": 7} for value in values])
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert mean == {"ttft": {"mean": pytest.approx(3.75)}, "requests": 7}
    assert intervals["ttft.mean"]["confidence"] == pytest.approx([low, high])
    reach = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) * np.sqrt(1 + 1 / 4)
    assert intervals["ttft.mean"]["prediction"] == pytest.approx([3.75 - reach, 3.75 + reach])
    assert intervals["ttft.mean"]["parts"] == {"sampling": pytest.approx(np.std(values, ddof=1) / 3.75), "model": None}


def test_one_run_has_no_interval() -> None:
    assert combine([{"tpot": None, "requests": 3}]) == ({"tpot": None, "requests": 3}, {})


def test_latencies_of_a_run_in_which_no_request_counts_are_missing() -> None:
    some, none = {"tpot": {"mean": 0.02}, "requests": 3}, {"tpot": None, "requests": 0}
    assert combine([some, none]) == ({"tpot": {"mean": None}, "requests": 1.5}, combine([some, none])[1])
    assert combine([none, some])[0] == {"tpot": None, "requests": 1.5}
    assert set(combine([some, none])[1]) == {"requests"}


def test_no_interval_is_of_zero_width() -> None:
    """A metric that neither replications nor draws change has none: an interval of no width would promise certainty."""
    same = {"requests": 7, "tpot": {"mean": 0.02}}
    assert with_width(combine([same, same, same], [same, same])[1]) == {}
    assert set(with_width(combine([same], [same, {**same, "requests": 8}])[1])) == {"requests"}


def test_draws_with_replications_by_hand() -> None:
    """Replications e² and e⁴ have the variance 2 in logarithms, draws e² and e⁶ 8, half as much again for the next one.

    Satterthwaite's degrees of freedom of the expectation: (1 + 12)² / (1² + 12²) = 1.1655.
    """
    mean, intervals = combine([{"x": np.exp(2.0)}, {"x": np.exp(4.0)}], [{"x": np.exp(2.0)}, {"x": np.exp(6.0)}])
    assert mean == {"x": pytest.approx((np.exp(2.0) + np.exp(4.0)) / 2)}
    low, high = np.log(intervals["x"]["confidence"])
    assert (low + high) / 2 == pytest.approx(3.0 + 4.0 - 2.0)
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 169 / 145) * np.sqrt(13.0))
    low, high = np.log(intervals["x"]["prediction"])
    assert (high - low) / 2 == pytest.approx(stats.t.ppf(0.975, 225 / 153) * np.sqrt(15.0))
    assert intervals["x"]["parts"] == {"sampling": pytest.approx(np.sqrt(2)), "model": pytest.approx(np.sqrt(12))}


def test_no_number_of_runs_narrows_the_error_of_the_model() -> None:
    rng = np.random.default_rng(2)
    draws = [{"x": float(np.exp(rng.normal(0, 0.1)))} for _ in range(400)]
    _, small = combine([{"x": 1.0}, {"x": 1.001}], draws)
    _, large = combine([{"x": 1.0 + 0.001 * (i % 2)} for i in range(400)], draws)
    for result in (small, large):
        low, high = result["x"]["confidence"]
        assert np.log(high / low) / 2 == pytest.approx(1.97 * 0.1, rel=0.1)


def test_a_metric_of_zeros_has_an_interval_on_its_own_scale() -> None:
    _, intervals = combine([{"preemptions": 0}], [{"preemptions": 0}, {"preemptions": 4}])
    low, high = intervals["preemptions"]["prediction"]
    assert (low + high) / 2 == 2.0
    assert intervals["preemptions"]["parts"]["sampling"] is None


def test_counts_stay_whole_where_runs_agree() -> None:
    mean, intervals = combine([{"requests": 7, "steps": 3, "tpot": None}, {"requests": 7, "steps": 4, "tpot": 1.0}])
    assert mean == {"requests": 7, "steps": 3.5, "tpot": None}
    assert isinstance(mean["requests"], int)
    assert set(intervals) == {"requests", "steps"}


def test_prediction_intervals_cover_a_further_run_under_another_draw() -> None:
    """The truth is one draw that is not known, in another realisation; 95 % of such runs must fall inside."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        draws, runs, truth = rng.normal(0, 0.1, 8), rng.normal(0, 0.07, 5), rng.normal(0, 0.1) + rng.normal(0, 0.07)
        _, intervals = combine(
            [{"x": float(np.exp(run))} for run in runs], [{"x": float(np.exp(runs[0] + draw))} for draw in draws]
        )
        low, high = intervals["x"]["prediction"]
        inside += low <= np.exp(truth) <= high
    assert 0.92 <= inside / 1000 <= 0.985


def test_the_effect_of_each_unknown_alone() -> None:
    varied = {
        "overhead": ({"x": {"mean": 9.0}, "n": 5}, {"x": {"mean": 11.0}, "n": 5}),
        "fit.0": ({"x": {"mean": 10.3}, "n": 5}, {"x": {"mean": 9.7}, "n": 5}),
        "fit.1": ({"x": {"mean": 9.6}, "n": 4}, {"x": {"mean": 10.4}, "n": 6}),
    }
    result = sensitivities({"x": {"mean": 10.0}, "n": 5}, varied)
    assert result["overhead"] == {"x.mean": pytest.approx(0.1), "n": 0.0}
    assert result["fit"] == {"x.mean": pytest.approx(0.05), "n": pytest.approx(0.2)}
