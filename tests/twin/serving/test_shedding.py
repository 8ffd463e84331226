"""Shed requests of a simulation: counted apart, sent again, and as many as queueing theory says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.metrics import controlled_mean
from tests.twin.serving.scenarios import plan_for, records, reported, run, scenario
from tests.twin.serving.test_service_classes import tenants
from twin.serving.results.groups import summarise_clients
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

STEP, STEPS = 1e-3, 200
SERVICE = STEP * STEPS


def sheds(limits: dict[str, Any], policy: str = "fair", **sections: Any) -> dict[str, Any]:
    engine = {"scheduling_policy": policy, "max_num_seqs": 3, "admission_control": limits}
    return tenants(engine=engine, **sections)


@pytest.mark.parametrize(
    "arrivals", [{"process": "poisson", "rate": 150.0}, {"process": "closed_loop", "concurrency": 20}]
)
def test_every_request_is_finished_or_shed_and_the_summary_says_so(arrivals: dict[str, Any]) -> None:
    document = sheds({"max_waiting": 2}, "priority", workload={"arrivals": arrivals})
    summary = reported(run(document), document)["summary"]
    shed = summary["shed"]
    assert summary["requests"] + shed["requests"] == 200
    assert shed["share"] == shed["requests"] / 200 > 0.1
    assert sum(service_class["shed"] for service_class in summary["service_classes"].values()) == shed["requests"]
    assert sum(tenant["shed"] for tenant in summary["tenants"].values()) == shed["requests"]
    chat = summary["service_classes"]["chat"]
    assert chat["goals_met"] <= 1 - chat["shed_share"]  # a shed request meets no goal
    assert summary["littles_law_error"] < 1e-9


def test_fair_limits_shed_the_flood_alone() -> None:
    def share(limits: dict[str, Any], policy: str) -> dict[str, float]:
        document = sheds(limits, policy, workload={"requests": 800, "arrivals": {"process": "poisson", "rate": 50.0}})
        plan = plan_for(document)
        summary = summarise_clients(run(document), plan)["tenants"]
        return {name: row["shed_share"] for name, row in summary.items()}

    common, apart = share({"max_waiting": 10}, "fcfs"), share({"max_waiting_per_tenant": 10}, "fair")
    assert common["modest"] == pytest.approx(common["flood"], abs=0.1)
    assert common["modest"] > 0.1
    assert apart["modest"] == 0 < apart["flood"]


@pytest.mark.parametrize("places", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_queue_with_few_places_is_m_m_1_k(places: int) -> None:
    """An engine of one sequence with K - 1 places to wait loses (1 - ρ) ρ^K / (1 - ρ^(K+1)) of the requests."""
    load = 0.9
    document = scenario(
        workload={"prefill": {"distribution": "fixed", "mean": 1}, "requests": 5000,
                  "decode": {"distribution": "geometric", "mean": STEPS},
                  "arrivals": {"process": "poisson", "rate": load / SERVICE}},
        engine={"num_gpu_blocks": 10**7, "max_num_seqs": 1, "enable_prefix_caching": False,
                "admission_control": {"max_waiting": places - 1}},
        step_time={"overhead": STEP, "per_token": 0.0, "per_kv_token": 0.0},
    )  # fmt: skip
    plan = plan_for(document)
    rows = []
    for seed in range(100, 110):
        result = Simulation(replace(plan, scenario=plan.scenario.model_copy(update={"seed": seed}))).run()
        arrivals = np.concatenate([np.array(result.columns.arrival), np.array(result.shed.arrival)])
        rows.append((len(result.shed.ended) / len(arrivals), len(arrivals) / arrivals.max() * SERVICE - load))
    losses, excess = np.array(rows).T
    estimate = controlled_mean(losses, excess, 0.0, confidence=0.99)
    expected = (1 - load) * load**places / (1 - load ** (places + 1))
    assert abs(estimate.mean - expected) <= estimate.half_width
    assert estimate.half_width < 0.1 * expected, "an interval this wide shows nothing"


def test_retries_have_jitter_and_a_seed() -> None:
    document = sheds({"max_waiting": 2}, workload={"retries": {"attempts": 3, "jitter": 0.5}})
    first, again, second = run(document), run(document), run(document, 1)
    assert records(first) == records(again) != records(second)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"classes": {"chta": {"max_waiting": 1}}}, r"engine.admission_control.classes: got 'chta', expected names of"),
        ({"max_waiting": 0}, r"engine.admission_control.max_waiting: got 0"),
    ],
)
def test_limits_that_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(sheds(limits), Path("s.yaml"))


def test_sessions_are_refused() -> None:
    sessions = {
        "source": "drawn",
        "turns": {"distribution": "fixed", "mean": 2},
        "growth": {"distribution": "fixed", "mean": 9},
    }
    document = scenario(workload={"sessions": sessions}, engine={"admission_control": {"max_waiting": 3}})
    with pytest.raises(BadInput, match="a turn of a session needs the answer before it"):
        prepare(document, Path("s.yaml"))
