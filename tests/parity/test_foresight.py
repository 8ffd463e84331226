"""Engines that visit step ends before their time leave the same records, to the last bit, as those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from tests.twin.serving.scenarios import fleets, plan_for, records, reported, scenario
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation


def simulate(document: dict[str, Any], *, early: bool) -> tuple[Run, int]:
    """A run and the entries that its event queue had. A watcher is told of steps in order, so nothing is early."""
    plan = plan_for(document)
    simulation = Simulation(plan, watch=None if early else lambda engine, batch, start, end: None)
    assert any(engine.foresight for engine in simulation.system.engines) == early
    return simulation.run(), next(simulation.environment._eid)


def of_order(run: Run) -> list[tuple[float, int]]:
    """Requests in the order in which they finished."""
    return list(zip(run.columns.last_token, run.columns.id, strict=True))


@given(fleets(models=[1], caching=[True, False]))
def test_early_visits_change_no_record(document: dict[str, Any]) -> None:
    (early, _), (punctual, _) = (simulate(document, early=flag) for flag in (True, False))
    assert of_order(early) == of_order(punctual)
    assert records(early) == records(punctual)
    assert reported(early, document) == reported(punctual, document)
    assert [log.events for log in early.logs] == [log.events for log in punctual.logs]


@pytest.mark.parametrize("tasks", [False, True])
@pytest.mark.parametrize("routing", ["least_loaded", "round_robin"])
def test_most_step_ends_are_visited_early(routing: str, tasks: bool) -> None:
    """The load of requests without an answer grows by a token when the scheduler gets them."""
    document = scenario(
        workload={"requests": 400, "arrivals": {"process": "poisson", "rate": 400}},
        system={"layout": "colocated", "replicas": 8, "routing": routing},
    )
    if tasks:
        lengths = {"prefill": {"distribution": "uniform", "low": 1, "high": 90}}
        document["workload"] = {
            "requests": 400, "arrivals": {"process": "poisson", "rate": 400},
            "tasks": [
                {"task": "generate", "weight": 0.5, **lengths, "decode": {"distribution": "geometric", "mean": 20}},
                {"task": "classify", "weight": 0.5, **lengths},
            ],
        }  # fmt: skip
    (early, small), (punctual, large) = (simulate(document, early=flag) for flag in (True, False))
    assert of_order(early) == of_order(punctual)
    assert records(early) == records(punctual)
    assert small < 0.9 * large


@pytest.mark.parametrize(
    "sections",
    [
        {"workload": {"arrivals": {"process": "closed_loop", "concurrency": 8}}},
        {"failures": [{"engine": "engine-0", "at": 0.1, "duration": 0.1}]},
        {"system": {"layout": "colocated", "replicas": 4, "routing": "power_of_two"}},
        {"system": {"layout": "colocated", "replicas": 1}},
    ],
)
def test_where_something_may_come_in_between_no_visit_is_early(sections: dict[str, Any]) -> None:
    document = scenario(**{"system": {"layout": "colocated", "replicas": 4}, **sections})
    plan = plan_for(document)
    assert not any(engine.foresight for engine in Simulation(plan).system.engines)
