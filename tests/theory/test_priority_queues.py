"""An engine of one sequence under `scheduling_policy: priority` is M/M/1 with priorities: Cobham's formula."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.queueing import mmc_wait, priority_waits
from reports.metrics import controlled_mean
from tests.theory.queues import constant, plan_of, servers, simulated
from tests.twin.serving.scenarios import scenario
from twin.serving.plan.plan import ServingPlan

STEP, STEPS = 1e-3, 200
SERVICE = STEP * STEPS
LOAD, SHARES = 0.8, (0.3, 0.7)
REQUESTS, REPLICATIONS, WARM_UP = 4000, 12, 30.0


def plan(policy: str) -> ServingPlan:
    """Requests of a prompt token and an exponential number of steps; two classes that differ in priority alone."""
    tasks = [
        {
            "task": "generate", "weight": share, "service_class": name, "tenant": name,
            "prefill": {"distribution": "fixed", "mean": 1}, "decode": {"distribution": "geometric", "mean": STEPS},
        }
        for name, share in zip(("first", "second"), SHARES, strict=True)
    ]  # fmt: skip
    document = scenario(engine=servers(1, scheduling_policy=policy), step_time=constant(STEP))
    document["workload"] = {
        "requests": REQUESTS, "tasks": tasks, "arrivals": {"process": "poisson", "rate": LOAD / SERVICE},
        "service_classes": {"first": {"priority": 0, "ttft": 1}, "second": {"priority": 1, "ttft": 9}},
    }  # fmt: skip
    return plan_of(document)


def waits(serving_plan: ServingPlan, seed: int) -> tuple[float, float, float]:
    """Mean wait of each class, and by how much the load drawn exceeds its expectation."""
    table = simulated(serving_plan, seed)
    counts = table["arrival"] > WARM_UP
    wait = table["scheduled"] - table["arrival"]
    means = [wait[counts & (table["service_class"] == name)].mean() for name in ("first", "second")]
    load = table["output_tokens"].sum() * STEP / table["arrival"].max()
    return float(means[0]), float(means[1]), float(load - LOAD)


def test_priorities_that_do_not_interrupt() -> None:
    serving_plan = plan("priority")
    rows = np.array([waits(serving_plan, seed) for seed in range(100, 100 + REPLICATIONS)])
    expected = priority_waits([share * LOAD / SERVICE for share in SHARES], SERVICE)
    for name, measured, theory in zip(("first", "second"), rows.T[:2], expected, strict=True):
        estimate = controlled_mean(measured, rows.T[2], 0.0, confidence=0.99)
        assert abs(estimate.mean - theory) <= estimate.half_width, (name, estimate, theory)
        assert estimate.half_width < 0.25 * theory, "an interval this wide shows nothing"
    assert expected[1] > 3 * expected[0]


def test_the_formula_by_hand() -> None:
    """One class is M/M/1; work is conserved: waits weighted by load are those of any order."""
    assert priority_waits([3.0], 0.2) == pytest.approx([mmc_wait(3.0, 0.2)])
    rates = [1.0, 2.0, 0.5]
    mean = sum(rate * wait for rate, wait in zip(rates, priority_waits(rates, 0.2), strict=True)) / sum(rates)
    assert mean == pytest.approx(mmc_wait(sum(rates), 0.2))
