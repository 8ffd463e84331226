"""Service classes and tenants of a simulation: orders of waiting, what is reported by class, and how fair it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twin
from latency_models.io.config_io import write_yaml
from reports.metrics import jain_index
from tests.twin.serving.scenarios import plan_for, records, run, scenario
from twin.serving.results.groups import summarise_clients
from twin.sweeps.one_run import run_plan
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput


def tenants(**sections: Any) -> dict[str, Any]:
    """Two tenants; the first sends three requests of four."""
    shares = (("flood", "batch", 3), ("modest", "chat", 1))
    document = scenario(**sections)
    document["workload"] = {
        "requests": 200,
        "service_classes": {"chat": {"priority": 0, "ttft": 0.03, "tpot": 0.02}, "batch": {"priority": 1, "ttft": 5}},
        "tasks": [
            {
                "task": "generate", "tenant": tenant, "service_class": name, "weight": weight,
                "prefill": {"distribution": "uniform", "low": 1, "high": 90},
                "decode": {"distribution": "geometric", "mean": 20},
            }
            for tenant, name, weight in shares
        ],
        "arrivals": {"process": "poisson", "rate": 120.0},
        **sections.get("workload", {}),
    }  # fmt: skip
    return document


LENGTHS = {"prefill": {"distribution": "fixed", "mean": 9}, "decode": {"distribution": "fixed", "mean": 9}}
PLAIN = {"workload": {"requests": 9, **LENGTHS, "arrivals": {"process": "poisson", "rate": 9.0}}}
"""A workload without classes and tenants."""


def test_fast_forwarding_passes_over_steps_while_tenants_wait_for_slots() -> None:
    engine = {"scheduling_policy": "fair", "max_num_seqs": 4}
    fast, slow = (run(tenants(engine=engine, fast_forward=mode)) for mode in (True, False))
    assert fast.logs[0].events < 0.6 * slow.logs[0].events


def test_classes_and_tenants_are_reported(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(write_yaml(tenants(engine={"scheduling_policy": "priority", "max_num_seqs": 4})))
    result = twin.simulate(tmp_path / "s.yaml")
    summary, requests = result.document["summary"], result.requests
    chat = requests[requests["service_class"] == "chat"]
    metrics = summary["service_classes"]["chat"]
    assert metrics["requests"] == len(chat) > 30
    assert metrics["ttft"]["p99"] == pytest.approx(np.percentile(chat["ttft"], 99), rel=1e-12)
    good = (chat["ttft"] <= 0.03) & ~(chat["tpot"] > 0.02)
    assert 0 < good.mean() < 1
    assert metrics["goals_met"] == pytest.approx(good.mean())
    assert set(summary["tenants"]) == set(requests["tenant"]) == {"flood", "modest"}
    modest = requests[requests["tenant"] == "modest"]
    service = modest["prompt_tokens"].sum() + 2 * modest["output_tokens"].sum()
    assert summary["tenants"]["modest"]["service"] == service
    assert result.summary.loc["service_classes.chat.ttft.p99", "unit"] == "s"
    assert set(requests) - set(twin.simulate(tmp_path / "s.yaml", PLAIN).requests) == {"service_class", "tenant"}
    assert set(result.document["series"]["classes"]) == {"batch flood", "chat modest"}


@pytest.mark.parametrize("detail", [True, "requests", False])
def test_the_report_does_not_depend_on_what_is_kept(tmp_path: Path, detail: bool | str) -> None:
    def summary(document: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        plan = plan_for(document)
        return summarise_clients(run_plan(plan, **arguments), plan)

    total = summary(tenants())
    assert summary(tenants(detail=detail), sink=(lambda part: None) if detail else None) == total


def test_independent_engines_report_the_same() -> None:
    document = tenants(system={"layout": "colocated", "replicas": 3, "routing": "round_robin"})
    plan = plan_for(document)
    together, apart = run(document), run_plan(plan)
    assert records(together) == records(apart)
    assert summarise_clients(together, plan) == summarise_clients(apart, plan)


def test_a_fair_order_is_fairer_than_first_come_first_served() -> None:
    def index(policy: str) -> float:
        engine = {"scheduling_policy": policy, "max_num_seqs": 4}
        document = tenants(engine=engine, workload={"requests": 800, "arrivals": {"process": "poisson", "rate": 300.0}})
        plan = plan_for(document)
        return float(summarise_clients(run(document), plan)["fairness"]["jain_index"])

    # Under first come, first served, service follows demand: 3 to 1 of entitlements of 1 to 1 is 16/20.
    assert index("fcfs") == pytest.approx(0.8, abs=0.03)
    assert index("fair") > 0.99


def test_jains_index_by_hand() -> None:
    assert jain_index(np.array([2.0, 2.0, 2.0])) == 1
    assert jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == 0.25
    assert jain_index(np.array([3.0, 1.0])) == 16 / 20


def test_a_workload_without_classes_reports_none() -> None:
    plan = plan_for(scenario())
    assert summarise_clients(run(scenario()), plan) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"service_class": "chta"}, r"workload.tasks.0.service_class: got 'chta', expected one of workload.service_cl"),
        ({"priority": 3}, r"workload.tasks.0.priority: got 3, expected none: that of service_classes.batch holds"),
    ],
)
def test_tasks_that_are_refused(change: dict[str, Any], message: str) -> None:
    document = tenants()
    document["workload"]["tasks"][0] |= change
    with pytest.raises(BadInput, match=message):
        prepare(document, Path("s.yaml"))


@pytest.mark.parametrize(
    ("scheduling", "message"),
    [
        ("fifo", "expected one of fcfs, priority, shortest_prompt, deadline, lpm, fair"),
        ({"policy": "fair", "weights": {"a": 0}}, "weights.a: got 0, expected a number above 0"),
        ({"policy": "fcfs", "output_weight": 2}, "expected parameters of fcfs"),
    ],
)
def test_orders_that_are_refused(scheduling: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(tenants(engine={"scheduling_policy": scheduling}), Path("s.yaml"))


def by_clients(**workload: Any) -> dict[str, Any]:
    """The workload of `tenants`, with the lengths said once."""
    document = tenants()
    tasks = document["workload"].pop("tasks")
    lengths = {name: tasks[0][name] for name in ("prefill", "decode")}
    clients = [{name: task[name] for name in ("tenant", "service_class", "weight")} for task in tasks]
    document["workload"] |= {**lengths, "clients": clients, **workload}
    return document


def test_clients_of_equal_lengths_are_tasks_of_equal_lengths() -> None:
    first, second = run(by_clients()), run(tenants())
    assert records(first) == records(second)
    assert first.columns.clients == second.columns.clients
    assert first.columns.client == second.columns.client


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"clients": [{"service_class": "gold"}]}, r"clients\.0\.service_class: got 'gold', expected one of"),
        ({"clients": [{"service_class": "chat", "priority": 2}]}, r"clients\.0\.priority"),
        ({"clients": [{"weight": 0}]}, r"clients\[0\]\.weight"),
        (
            {"sessions": {"source": "drawn", "turns": LENGTHS["decode"], "growth": LENGTHS["decode"]}},
            "clients: expected none with tasks, which name them, or sessions",
        ),
    ],
)
def test_clients_that_cannot_be_are_refused(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        run(by_clients(**changed))
