"""The fewest servers of a plan are those of queueing theory, where an engine is a textbook queue.

An engine of c seats whose steps take constant time, whatever their batch, is a queue with c servers: exponential
services where answers are geometric, fixed ones where answers are. Each number of seats is a kind of engine on as many
devices, so that the plan with the fewest devices has the fewest servers. Goals lie between what c - 1 and what c
servers reach, far from both.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.queueing import erlang_c, md1_wait, mmc_wait
from tests.twin.planning.scenarios import SMALL, planner

STEP, STEPS = 1e-2, 20
SERVICE = STEP * STEPS
MOST = 10


def mdc_wait(rate: float, service: float, servers: int) -> float:
    """Mean wait in M/D/c: customers present, from one service time to the next (Crommelin 1932), and Little's law."""
    load, size = rate * service, 400
    arrivals = np.array([math.exp(k * math.log(load) - load - math.lgamma(k + 1)) for k in range(size)])
    present = np.zeros(size)
    present[0] = 1.0
    for _ in range(2000):
        stay = np.concatenate([[present[: servers + 1].sum()], present[servers + 1 :]])
        present = np.convolve(stay, arrivals)[:size]
        present /= present.sum()
    waiting = (np.maximum(np.arange(size) - servers, 0) * present).sum()
    return float(waiting / rate)


def test_the_oracle_of_fixed_services_is_pollaczek_and_khinchine_with_one_server() -> None:
    assert mdc_wait(3.5, SERVICE, 1) == pytest.approx(md1_wait(3.5, SERVICE), rel=1e-6)


def fewest(load: float, answers: str, goals: dict[str, float]) -> int:
    """Servers that the plan recommends at `load` Erlangs."""
    kinds: list[dict[str, Any]] = [
        {"name": f"seats-{c}", "device": {"type": "server", "count": c}, "engine": {"max_num_seqs": c}}
        for c in range(1, MOST + 1)
    ]
    document = {
        **SMALL,
        "workload": {
            "prefill": {"distribution": "fixed", "mean": 1},
            "decode": {"distribution": answers, "mean": STEPS},
            "arrivals": {"process": "poisson", "rate": load / SERVICE},
        },
        "engine": {"num_gpu_blocks": 10**6, "enable_prefix_caching": False},
        "step_time": {"source": "linear", "overhead": STEP},
        # The span is long enough that its mean is its expectation.
        "plan": {"goals": goals, "engines": kinds, "limits": {"engines": 1}, "window": 2500, "replications": 8,
                 "span": 10 * 3600},
    }  # fmt: skip
    return planner(document).run().best.candidate.gpus


def between(waits: list[float]) -> float:
    """A limit far from both of two waits."""
    return math.sqrt(waits[0] * waits[1])


@pytest.mark.parametrize(("load", "servers"), [pytest.param(0.6, 2, marks=pytest.mark.slow), (2.5, 4)])
def test_exponential_services_and_a_mean_wait(load: float, servers: int) -> None:
    # At least one server more than the load keeps the queue without a goal; more is what the goal asks.
    waits = [mmc_wait(load / SERVICE, SERVICE, c) for c in (servers - 1, servers)]
    limit = STEP + between(waits)  # TTFT: the wait and the first step
    erlang = next(c for c in range(math.floor(load) + 1, MOST) if STEP + mmc_wait(load / SERVICE, SERVICE, c) <= limit)
    assert erlang == servers
    assert fewest(load, "geometric", {"ttft_mean": limit}) == erlang


@pytest.mark.slow
def test_exponential_services_and_a_percentile_of_the_wait() -> None:
    load, servers, quantile = 2.5, 5, 0.9

    def wait(c: int) -> float:
        """The wait of which 90 % have less: P(W > t) = C·exp(-(c - load)·t/service)."""
        return max(math.log(erlang_c(c, load) / (1 - quantile)) * SERVICE / (c - load), 0.0)

    limit = STEP + (wait(servers - 1) + wait(servers)) / 2
    assert wait(servers - 1) > 1.5 * wait(servers)
    assert fewest(load, "geometric", {"ttft_p90": limit}) == servers


@pytest.mark.parametrize(("load", "servers"), [(0.6, 2), pytest.param(2.5, 4, marks=pytest.mark.slow)])
def test_fixed_services(load: float, servers: int) -> None:
    waits = [mdc_wait(load / SERVICE, SERVICE, c) for c in (servers - 1, servers)]
    limit = STEP + between(waits)
    assert fewest(load, "fixed", {"ttft_mean": limit}) == servers
