"""Goals of a plan: names, limits and units."""

from __future__ import annotations

import pytest

from scenarios.goals import goals_of_texts, read_goals
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
        ("classify.itl_p99", 1.0, "expected ttft, tpot or e2e"),
    ],
)
def test_what_is_no_goal_is_refused(name: str, limit: float | str, expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        read_goals({name: limit})


def test_goals_of_the_command_line() -> None:
    assert goals_of_texts(["ttft_p99=1s", "tpot_mean=0.04"]) == {"ttft_p99": "1s", "tpot_mean": 0.04}
    for texts in (["ttft_p99"], ["ttft_p99=1s", "ttft_p99=2s"], ["ttft_p99=1s,2s"]):
        with pytest.raises(BadInput, match="--slo"):
            goals_of_texts(texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("p99_ttft=1s", "METRIC_STATISTIC such as ttft_p99"), ("ttft_p99=soon", "expected"), ("goodput=2", "at most 1")],
)
def test_a_flag_that_is_no_goal_is_named_with_its_text(text: str, expected: str) -> None:
    with pytest.raises(BadInput, match=f"^--slo: got '{text}'.*{expected}"):
        goals_of_texts([text])
