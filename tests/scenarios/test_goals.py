"""Goals of a plan: names, limits and units."""

from __future__ import annotations

import pytest

from latency_models.io.config_io import checked
from scenarios.fields import MeasureSpec, read_goals
from scenarios.reading import goals_of_texts
from workloads.errors import BadInput


def test_a_latency_goal_has_metric_statistic_class_and_unit() -> None:
    (goal,) = read_goals({"classify.e2e_p99.5": "200ms"})
    assert (goal.metric, goal.of, goal.limit) == ("e2e", "classify", 0.2)
    assert goal.quantile == pytest.approx(0.995)
    assert goal.at_most
    assert goal.ratio(0.3) == pytest.approx(1.5)


def test_a_mean_has_no_quantile() -> None:
    (goal,) = read_goals({"tpot_mean": 0.04})
    assert (goal.quantile, goal.of) == (None, None)


def test_a_share_and_a_rate_must_be_reached() -> None:
    share, rate = read_goals({"goodput": "95%", "output_throughput": 5000})
    assert share.limit == pytest.approx(0.95)
    assert not share.at_most
    assert rate.ratio(2500) == 2.0


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("ttft_99", 1.0, "expected METRIC_STATISTIC"),
        ("ttft_p0", 1.0, "expected a percentile above 0"),
        ("ttft_p99", 0, "expected a number above 0"),
        ("ttft_p99", "1 hour", "expected a number, or one with a unit"),
        ("ttft_p99", "1.2.3s", "expected a number"),
        ("goodput", "120%", "expected a share"),
        ("ttft_p99", "95%", "ttft_p99: got '95%', expected a number, or one with a unit: 1s, 40ms"),
        ("goodput", "95ms", "goodput: got '95ms', expected a number, or one with a unit: 95%"),
        ("ttft_p99", 800, "ttft_p99: got 800.0, expected seconds, at most 300; 0.8 is 800 milliseconds"),
        ("tpot_mean", "40", "tpot_mean: got 40.0, expected seconds, at most 10; 0.04 is 40 milliseconds"),
        ("chat.e2e_p95", 5000, "expected seconds, at most 3600; 5 is 5000 milliseconds"),
        ("classify.itl_p99", 1.0, "expected ttft, tpot or e2e"),
    ],
)
def test_what_is_no_goal_is_refused(name: str, limit: float | str, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        read_goals({name: limit})


def test_goals_of_the_command_line() -> None:
    texts = ["ttft_p99=1s", "tpot_mean=40ms", "goodput=0.95", "output_throughput=5000"]
    goals = {"ttft_p99": "1s", "tpot_mean": "40ms", "goodput": 0.95, "output_throughput": 5000}
    assert goals_of_texts(texts) == goals
    for texts in (["ttft_p99"], ["ttft_p99=1s", "ttft_p99=2s"], ["ttft_p99=1s,2s"]):
        with pytest.raises(BadInput, match="--slo"):
            goals_of_texts(texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99_ttft=1s", "METRIC_STATISTIC such as ttft_p99"),
        ("ttft_p99=soon", "expected"),
        ("goodput=2", "at most 1"),
        ("ttft_p99=800", r"expected a limit with its unit: ttft_p99=800ms or ttft_p99=800s$"),
        ("tpot_mean=0.04", r"expected a limit with its unit: tpot_mean=0.04ms or tpot_mean=0.04s$"),
        ("chat.e2e_p95=2", r"expected a limit with its unit: chat.e2e_p95=2ms or chat.e2e_p95=2s$"),
    ],
)
def test_a_flag_that_is_no_goal_is_named_with_its_text(text: str, expected: str) -> None:
    with pytest.raises(BadInput, match=f"^--slo: got '{text}'.*{expected}"):
        goals_of_texts([text])


def test_a_limit_with_its_unit_may_be_as_long_as_it_says() -> None:
    (goal,) = read_goals({"ttft_p99": "800s"})
    assert goal.limit == 800.0


def test_goals_of_requests_are_seconds_too() -> None:
    assert MeasureSpec(slo={"ttft": 2.0, "tpot": 0.05}).slo == {"ttft": 2.0, "tpot": 0.05}
    with pytest.raises(BadInput, match=r"slo.tpot: got 50.0, expected seconds, at most 10; 0.05 is 50 milliseconds"):
        checked(MeasureSpec, {"slo": {"ttft": 2.0, "tpot": 50.0}}, None)
