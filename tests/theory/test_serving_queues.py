"""An engine with degenerate settings is a textbook queue: M/M/1, M/M/c, M/D/1, through the same scheduler and plant.

Every request is one prompt token and as many steps of constant time as its answer has tokens. Runs start in the
stationary state (as many requests at time 0 as there would be), so there is no warm-up to forget; what is left of the
noise is reduced by regressing on the load that was really drawn, whose expectation is known.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.queueing import erlang_c, md1_wait, mmc_wait
from reports.metrics import controlled_mean
from tests.theory.queues import constant, plan_of, servers, simulated
from tests.twin.serving.scenarios import run, scenario
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import summarise
from workloads.arrivals import Replay
from workloads.generator import Workload
from workloads.lengths import Fixed, Geometric
from workloads.pairs import Independent

STEP = 1e-3
STEPS = 200
"""Tokens of a service, on average: geometric is then exponential to a quarter of a per cent of the wait."""

SERVICE = STEP * STEPS
REPLICATIONS = 10

CUSTOMERS = {0.5: 2200, 0.8: 1500, 0.95: 5_000}
"""A replication, by load: a nearly full queue remembers for hundreds of services."""


def present(rng: np.random.Generator, load: float, seats: int) -> int:
    """The number of customers that a stationary M/M/c queue of load λ/μ holds at a random instant."""
    if rng.random() < erlang_c(seats, load):
        return seats + int(rng.geometric(1 - load / seats)) - 1
    weights = np.cumprod([1.0, *(load / k for k in range(1, seats))])
    return int(rng.choice(seats, p=weights / weights.sum()))


def plan(seats: int) -> ServingPlan:
    return plan_of(engine=servers(seats), step_time=constant(STEP))


def replicate(kind: str, load: float, seats: int, seed: int) -> tuple[float, float]:
    """Mean wait of those who come after the start, and by how much the load drawn exceeds its expectation."""
    rng = np.random.default_rng(seed)
    here = present(rng, load * seats, seats)
    gaps = rng.exponential(SERVICE / (load * seats), CUSTOMERS[load])
    arrivals = Replay(np.concatenate([np.zeros(here), np.cumsum(gaps)]))
    answers = Fixed(STEPS) if kind == "M/D/1" else Geometric(STEPS)
    workload = Workload(Independent(Fixed(1), answers), arrivals)
    columns = simulated(plan(seats), seed, workload=workload, requests=here + CUSTOMERS[load])
    came = columns["id"] >= here
    excess = columns["output_tokens"].mean() / STEPS - gaps.mean() / (SERVICE / (load * seats))
    return float((columns["scheduled"] - columns["arrival"])[came].mean()), float(excess)


@pytest.mark.parametrize(
    "load", [pytest.param(0.5, marks=pytest.mark.slow), 0.8, pytest.param(0.95, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("kind", "seats"), [("M/M/1", 1), ("M/M/4", 4), ("M/D/1", 1)])
def test_mean_wait(kind: str, seats: int, load: float) -> None:
    waits, excess = np.array([replicate(kind, load, seats, seed) for seed in range(100, 100 + REPLICATIONS)]).T
    rate = load * seats / SERVICE
    expected = md1_wait(rate, SERVICE) if kind == "M/D/1" else mmc_wait(rate, SERVICE, seats)
    estimate = controlled_mean(waits, excess, 0.0, confidence=0.99)  # nine are tested
    assert abs(estimate.mean - expected) <= estimate.half_width
    assert estimate.half_width < 0.5 * expected, "an interval this wide shows nothing"


def test_one_server_follows_lindley() -> None:
    """W' = max(0, W + S - A), customer by customer."""
    arrivals = {"process": "poisson", "rate": 45}
    one = plan_of(workload={"prefill": {"distribution": "fixed", "mean": 1}, "arrivals": arrivals})
    columns = simulated(plan(1), workload=one.workload)
    order = np.argsort(columns["id"])
    arrival, service = columns["arrival"][order], columns["output_tokens"][order] * STEP
    wait = 0.0
    for i in range(1, len(order)):
        wait = max(0.0, wait + service[i - 1] - (arrival[i] - arrival[i - 1]))
        assert (columns["scheduled"] - columns["arrival"])[order][i] == pytest.approx(wait, abs=1e-9)


def test_erlang_c_by_hand() -> None:
    """Two servers, load 1: P(wait) = (1/2 · 2) / (1 + 1 + 1) = 1/3. One server: ρ."""
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(1, 0.7) == pytest.approx(0.7)


@pytest.mark.parametrize(
    "document",
    [
        scenario(),
        scenario(system={"layout": "colocated", "replicas": 3, "routing": "power_of_two"}),
        scenario(failures=[{"engine": "engine-0", "at": 0.4, "duration": 0.5}]),
        scenario(workload={"arrivals": {"process": "closed_loop", "concurrency": 7, "think": 0.1}}),
        scenario(
            system={
                "layout": "disaggregated", "decode": "shared", "decode_replicas": 2,
                "link": {"bandwidth": 1e9, "bytes_per_token": 131072},
            }
        ),
    ],
)  # fmt: skip
def test_littles_law(document: dict[str, Any]) -> None:
    """Requests counted in the system over time are the sum of their times in it, and nobody is lost."""
    summary = summarise(run(document), plan_of(document).scenario.measure)
    assert summary["requests"] == document["workload"]["requests"]
    assert summary["littles_law_error"] < 1e-9
