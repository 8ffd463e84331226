"""Overload is told of queues with a load above 1 and of no other, on textbook queues and on engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.theory.queues import constant, plan_of, servers
from tests.twin.serving.scenarios import run, scenario
from twin.serving.records.engine_log import Backlog
from twin.serving.results.report import overload, overload_of
from twin.serving.run.simulation import Simulation

STEP = 1e-3
SERVICE = 0.02
"""Seconds of a service on average, exponential but for the length of a step."""

SEEDS = range(6)


def queue(load: float, requests: int, **sections: Any) -> dict[str, Any]:
    """M/M/1: one seat, answers of 20 steps on average; `sections` as for `scenario`."""
    workload = {
        "requests": requests, "prefill": {"distribution": "fixed", "mean": 1},
        "decode": {"distribution": "geometric", "mean": round(SERVICE / STEP)},
        "arrivals": {"process": "poisson", "rate": load / SERVICE},
    }  # fmt: skip
    sections["workload"] = {**workload, **sections.get("workload", {})}
    sections["engine"] = servers(1) | sections.get("engine", {})
    return scenario(step_time=constant(STEP), detail=False, **sections)


def simulated_overload(document: dict[str, Any], seed: int = 0) -> dict[str, Any] | None:
    plan = plan_of({**document, "seed": seed})
    return overload(Simulation(plan).run(), plan)


@pytest.mark.parametrize("requests", [200, 2000])
def test_a_stable_queue_is_not_overloaded(requests: int) -> None:
    assert [simulated_overload(queue(0.8, requests), seed) for seed in SEEDS] == [None] * len(SEEDS)


def test_a_load_above_one_is_told_with_its_rates() -> None:
    for seed in SEEDS:
        overload = simulated_overload(queue(1.2, 2000), seed)
        assert overload["arrival_rate"] == pytest.approx(1.2 / SERVICE, rel=0.1)
        assert overload["service_rate"] == pytest.approx(1 / SERVICE, rel=0.1)
        assert overload["drain"] == pytest.approx(overload["waiting"] * SERVICE, rel=0.35)


@pytest.mark.parametrize(("load", "overloaded"), [(0.8, False), (1.2, True)])
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_replicas_are_one_pool(load: float, overloaded: bool, routing: str) -> None:
    """Twelve queues of 250 requests each say nothing alone; together they do."""
    system = {"layout": "colocated", "replicas": 12, "routing": routing}
    workload = {"arrivals": {"process": "poisson", "rate": 12 * load / SERVICE}}
    document = queue(load, 3000, workload=workload, system=system)
    assert [simulated_overload(document, seed) is not None for seed in range(3)] == [overloaded] * 3


def test_one_model_of_several_is_told() -> None:
    """Three quarters of the requests go to the first model, whose engine they overload at a load of 1.36."""
    models = {"count": 3, "zipf": 2.0}
    overload = simulated_overload(queue(1.85, 3000, workload={"models": models}))
    assert overload["engines"] == ["model-0/engine-0"]


def test_a_decode_pool_that_is_too_small_is_told() -> None:
    link = {"bandwidth": 1e12, "latency": 0.0, "bytes_per_token": 1.0}
    document = queue(1.2, 2000, system={"layout": "disaggregated", "link": link})
    overload = simulated_overload(document)
    assert overload["engines"] == ["decode-0"]
    assert simulated_overload(queue(0.8, 2000, system={"layout": "disaggregated", "link": link})) is None


@pytest.mark.parametrize("clients", [{}, {"think": 0.01}])
def test_a_closed_loop_is_never_overloaded(clients: dict[str, float]) -> None:
    workload = {"arrivals": {"process": "closed_loop", "concurrency": 50, **clients}}
    assert simulated_overload(queue(1.0, 2000, workload=workload)) is None


def test_a_batch_that_fills_is_not_overloaded() -> None:
    """Answers take longer than all arrivals do, but there are seats for all of them."""
    document = queue(100.0, 500, engine={"max_num_seqs": 500, "max_num_batched_tokens": 1000})
    assert simulated_overload(document) is None


def test_a_burst_at_the_end_is_not_overload(tmp_path: Path) -> None:
    """Ten seconds of one request a second, and then 300 in a second."""
    times = [*range(10), *(10 + i / 300 for i in range(300))]
    rows = "\n".join(f"{time},1,20" for time in times)
    (tmp_path / "t.csv").write_text(f"arrival,prompt_tokens,output_tokens\n{rows}\n")
    document = queue(1.0, 310)
    document["workload"] = {"trace": {"path": str(tmp_path / "t.csv")}, "arrivals": {"process": "replay"}}
    assert simulated_overload(document) is None


def test_requests_that_come_at_once_have_no_rate() -> None:
    backlog = Backlog()
    for _ in range(1000):
        backlog.arrive(0.0)
    assert overload_of({"engine-0": backlog}) is None


def test_counts_by_hand() -> None:
    """Empty at 10 after one request; then one a second, of which every second starts: 100 arrivals, 50 starts."""
    backlog = Backlog()
    backlog.arrive(10.0)
    backlog.start(10.0)
    for i in range(1, 101):
        backlog.arrive(10.0 + i)
        if i % 2 == 0:
            backlog.start(10.0 + i)
    overload = overload_of({"engine-0": backlog})
    assert overload == {"engines": ["engine-0"], "arrival_rate": 1.0, "service_rate": 0.49, "waiting": 51}
    backlog.lose_all(111.0)
    backlog.arrive(112.0)
    assert overload_of({"engine-0": backlog}) is None


def test_preempted_requests_start_once() -> None:
    """Every request starts once at its engine, however often it loses its cache."""
    result = run(scenario(engine={"num_gpu_blocks": 20}))
    assert sum(result.columns.preemptions) > 0
    backlog = result.engines[0].backlog
    backlog.arrive(result.end)
    assert backlog.last[1:3] == (61, 60)
