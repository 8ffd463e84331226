"""Engines that share nothing, simulated apart and in several processes, leave what one simulation of all leaves."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.run_directory import writing_columns
from schedulers.routing import ROUTERS
from tests.twin.serving import by_hand
from tests.twin.serving.by_hand import Row
from tests.twin.serving.scenarios import fleets, plan_for, records, reported, scenario
from twin.serving.engine.engine import Engine
from twin.serving.plan.plan import ServingPlan
from twin.serving.records import engine_log
from twin.serving.results import summary
from twin.serving.results.report import report_run, timeseries
from twin.serving.results.summary import Run
from twin.serving.run import independent_engines
from twin.serving.run.independent_engines import independent_groups, simulate_apart, why_together
from twin.serving.run.simulation import Simulation
from twin.sweeps import one_run
from workloads.request import Request


def plan_of(document: dict[str, Any]) -> ServingPlan:
    return plan_for(document)


def assert_equal(result: Run, expected: Run, document: dict[str, Any]) -> None:
    """Compare records in the order in which requests finished, logs with the numbers of visits, and reports."""
    for name, column in expected.request_table().items():
        assert result.request_table()[name].tolist() == column.tolist(), name
    assert records(result) == records(expected)
    for log, expected_log in zip(result.logs, expected.logs, strict=True):
        assert (log.name, log.events, log.states().tolist()) == (
            expected_log.name,
            expected_log.events,
            expected_log.states().tolist(),
        )
    assert reported(result, document) == reported(expected, document)


@given(fleets(models=[1, 2, 5], caching=[True]), st.sampled_from([1, 7, 1000]))
def test_apart_as_together(document: dict[str, Any], span: int) -> None:
    plan = plan_of(document)
    if why_together(plan) is not None:
        assert document["system"]["routing"] == "least_loaded"
        assert document["workload"]["models"]["count"] == 1
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(independent_engines, "SPAN", span)
        apart = simulate_apart(plan)
    assert_equal(apart, Simulation(plan_of(document)).run(), document)


@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=30),
    replicas=st.integers(2, 4),
    asynchronous=st.booleans(),
    fast_forward=st.booleans(),
    span=st.sampled_from([1, 3, 1000]),
)
def test_events_at_the_same_instant(
    rows: list[Row], replicas: int, asynchronous: bool, fast_forward: bool, span: int
) -> None:
    """Everything happens at whole ticks, so arrivals, step ends and answers of several engines coincide."""
    sections: dict[str, Any] = {
        "system": {"layout": "colocated", "replicas": replicas, "routing": "round_robin"},
        "engine": {"async_scheduling": asynchronous}, "fast_forward": fast_forward,
    }  # fmt: skip
    apart, together = (by_hand.plan_of(sorted(rows), **sections) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(independent_engines, "SPAN", span)
        result = simulate_apart(apart)
    assert_equal(result, Simulation(together).run(), scenario(**sections))


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("detail", [True, "requests", False])
def test_in_processes_as_in_one(
    detail: bool | str, processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Steps may leave memory, and the request file is the same to the last byte."""
    document = scenario(
        detail=detail, system={"layout": "colocated", "replicas": 4, "routing": "round_robin"},
        workload={"requests": 300, "arrivals": {"process": "poisson", "rate": 200}, "models": {"count": 2}},
        measure={"after": 0.2}, engine={"num_gpu_blocks": 20},
    )  # fmt: skip
    for module, name, value in (
        (one_run, "WORTH_A_PROCESS", 1), (independent_engines, "SPAN", 40), (engine_log, "WORTH_A_PART", 3),
        (summary, "MANY_STEPS", 100 if detail == "requests" else 1 << 20), (summary, "STEPS_OF_PART", 50),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    plans = [plan_of(document) for _ in range(2)]
    with writing_columns(tmp_path / "found.parquet") as write:
        result = one_run.run_plan(plans[0], sink=write if detail else None, processes=processes)
    with writing_columns(tmp_path / "expected.parquet") as write:
        expected = Simulation(plans[1], sink=write if detail else None).run()
    assert not isinstance(result.engines[0], Engine)
    assert report_run(result, plans[0]) == report_run(expected, plans[1])
    assert result.columns.last_token == expected.columns.last_token
    assert (result.population, result.end) == (expected.population, expected.end)
    if detail:
        content = [(tmp_path / f"{name}.parquet").read_bytes() for name in ("found", "expected")]
        assert content[0] == content[1]
    if detail is True:
        assert timeseries(result, plans[0].scenario.measure) == timeseries(expected, plans[1].scenario.measure)
    else:
        assert all(len(log.ends) < log.num_steps for log in result.logs)


TOGETHER = [
    ({"system": {"layout": "colocated"}}, "system: there is one engine"),
    ({}, "system.routing: least_loaded looks at all engines"),
    ({"workload": {"models": {"count": 2}}, "system": {"replicas": 2, "routing": "power_of_two"}}, "system.routing"),
    ({"workload": {"arrivals": {"process": "closed_loop", "concurrency": 8}}}, "workload.arrivals: clients"),
    ({"failures": [{"engine": "engine-0", "at": 0.1, "duration": 0.1}]}, "failures: "),
    ({"system": {"layout": "disaggregated", "link": {"bandwidth": 1e9, "bytes_per_token": 1}}}, "system.layout: "),
    ({"system": {"replicas": 4, "routing": "round_robin", "kv_events": {"delay": 0.1}}}, "system.kv_events: "),
    ({"system": {"replicas": 4, "routing": "round_robin", "frontend": {"route": 0.1}}}, "system.frontend: "),
    (
        {"system": {"replicas": 4, "routing": "round_robin"}, "measure": {"prefix_cache": True}},
        "measure.prefix_cache: ",
    ),
]


@pytest.mark.parametrize(("sections", "why"), TOGETHER)
def test_engines_that_share_something_are_simulated_together(sections: dict[str, Any], why: str) -> None:
    sections = {"system": {"replicas": 4}, **sections}
    sections["system"] = {"layout": "colocated", **sections["system"]}
    plan = plan_of(scenario(**sections))
    shared = why_together(plan)
    assert shared.startswith(why)
    assert len(independent_groups(plan)) == 1


def test_a_router_that_inherits_its_turns_looks_at_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    class First:
        def turn_of(self, number: int, size: int) -> int:
            return 0

    class Emptiest(First):
        def choose(self, request: Request, engines: Many[Any]) -> Any:
            return max(engines, key=lambda engine: engine.free_blocks)

    monkeypatch.setitem(ROUTERS, "emptiest", lambda draw: Emptiest())
    system = {"layout": "colocated", "replicas": 4, "routing": "emptiest"}
    assert why_together(plan_of(scenario(system=system))) is not None
