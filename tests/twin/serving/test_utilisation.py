"""Utilisation and load of engines, against values computed by hand and against Little's law."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.fields import MeasureSpec
from tests.twin.serving.scenarios import run, scenario
from twin.serving.results.summary import Run, engine_summaries, summarise

ONE = {
    "requests": 1,
    "prefill": {"distribution": "fixed", "mean": 32},
    "decode": {"distribution": "fixed", "mean": 5},
    "arrivals": {"process": "deterministic", "rate": 1.0},
}
STEP = {"overhead": 0.125, "per_token": 0.0, "per_kv_token": 0.0}
"""Every step takes an eighth of a second, so that sums are exact."""


def entries(result: Run) -> dict[str, tuple[float, float, float]]:
    return {entry["name"]: (entry["busy"], entry["load"], entry["kv_used"]) for entry in engine_summaries(result)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_one_request_by_hand(fast: bool, asynchronous: bool) -> None:
    """It arrives at 1.0 and takes a prompt step and four decode steps: one of 16 seats for 0.625 s until 1.625, and of
    400 blocks two for its prompt and, from its second token on, a third. A step ahead, a block is taken a step early.
    """
    result = run(scenario(workload=ONE, step_time=STEP, engine={"async_scheduling": asynchronous}, fast_forward=fast))
    assert result.end == 1.625
    block_seconds = 3 * 0.625 if asynchronous else 2 * 0.125 + 3 * 0.5
    expected = (0.625 / 1.625, 0.625 / 1.625 / 16, block_seconds / 1.625 / 400)
    assert entries(result)["engine-0"] == pytest.approx(expected, rel=1e-12)
    summary = summarise(result, MeasureSpec())
    assert (summary["busy"], summary["load"], summary["kv_used"]) == pytest.approx(expected, rel=1e-12)


def test_idle_replicas_lower_the_share_and_not_the_busy_one() -> None:
    system = {"layout": "colocated", "replicas": 4, "routing": "round_robin"}
    result = run(scenario(workload=ONE, step_time=STEP, system=system))
    busy = 0.625 / 1.625
    assert [entry[0] for entry in entries(result).values()] == pytest.approx([busy, 0, 0, 0])
    summary = summarise(result, MeasureSpec())
    assert (summary["busy"], summary["load"]) == pytest.approx((busy / 4, busy / 4 / 16))


def test_blocks_stay_in_use_until_a_cache_has_arrived() -> None:
    """The prompt step ends at 1.125, and the cache of 32 tokens is with the decode engine at 2.375."""
    link = {"bandwidth": 32 * 1000.0, "latency": 0.25, "bytes_per_token": 1000.0}
    result = run(scenario(workload=ONE, step_time=STEP, system={"layout": "disaggregated", "link": link}))
    assert result.end == 2.875
    assert entries(result)["prefill-0"][2] == pytest.approx(2 * 1.375 / 2.875 / 400, rel=1e-12)
    assert entries(result)["decode-0"][2] == pytest.approx(3 * 0.5 / 2.875 / 400, rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"engine": {"async_scheduling": True}}, {"engine": {"data_parallel_size": 2}}])
def test_load_obeys_littles_law(changes: dict[str, Any]) -> None:
    """Seats taken over time are the time that requests spend between their first step and their last."""
    result = run(scenario(**changes))
    columns, seats = result.columns, 16 * (2 if "data_parallel_size" in changes.get("engine", {}) else 1)
    assert sum(columns.preemptions) == 0
    service = sum(last - first for first, last in zip(columns.scheduled, columns.last_token, strict=True))
    assert summarise(result, MeasureSpec())["load"] == pytest.approx(service / (result.end * seats), rel=1e-9)


def test_an_engine_that_is_down_is_idle_and_empty() -> None:
    """The request's engine is down from 1.25 to 2.25 and begins anew: the step that was broken off never ran."""
    failures = [{"engine": "engine-0", "at": 1.3, "duration": 0.95}]
    result = run(scenario(workload=ONE, step_time=STEP, failures=failures))
    (busy, load, _) = entries(result)["engine-0"]
    assert result.logs[0].outages == [(1.3, 2.25)]
    assert busy == pytest.approx((0.25 + 3 * 0.125) / result.end)
    assert load == pytest.approx((0.3 + 3 * 0.125) / result.end / 16)


def test_without_detail_blocks_over_time_are_not_known() -> None:
    summary = summarise(run(scenario(detail=False)), MeasureSpec())
    assert summary["kv_used"] is None
    assert summary["load"] == summarise(run(scenario()), MeasureSpec())["load"]
