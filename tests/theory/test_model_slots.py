"""An engine that loads its model when it is asked for is a queue with set-up times, whose times are known.

- One model that leaves its slot after `keep_alive` seconds: M/G/1 with set-up (Welch, Operations Research 12, 1964).
  The set-up D is the load with probability e^(-λ keep_alive), the chance that an idle period outlasts it, else 0:
  W = λE[S²] / (2(1 - ρ)) + (2E[D] + λE[D²]) / (2(1 + λE[D])).
- Two models as popular as each other, one slot, first come, first served: whether the next request is for the other
  model is a fair coin, whatever came before. It is M/G/1 with services S + D · coin (Pollaczek-Khinchine).
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.theory.queues import constant, plan_of
from twin.serving.run.simulation import Simulation

STEP, TOKENS, LOAD = 0.01, 10, 0.15
SERVICE = STEP * TOKENS
REQUESTS, REPLICATIONS = 4000, 12


def times(rate: float, models: int, keep_alive: float | None) -> np.ndarray:
    """The mean time in the system of each replication."""
    swapping = {"resident": 1, "weight_bytes": LOAD * 1e9, "load": {"bandwidth": 1e9}, "keep_alive": keep_alive}
    plan = plan_of(
        workload={
            "requests": REQUESTS, "arrivals": {"process": "poisson", "rate": rate}, "models": {"count": models},
            "prefill": {"distribution": "fixed", "mean": 1}, "decode": {"distribution": "fixed", "mean": TOKENS},
        },
        engine={"max_num_seqs": 1, "enable_prefix_caching": False, "weight_swapping": swapping},
        step_time=constant(STEP),
        system={"layout": "pools", "pools": [{"name": "engine", "models": "all"}]},
    )  # fmt: skip
    means = []
    for replication in range(REPLICATIONS):
        columns = Simulation(plan, replication).run().columns.table()
        means.append(float((columns["last_token"] - columns["arrival"]).mean()))
    return np.array(means)


def agrees(measured: np.ndarray, expected: float) -> None:
    half_width = 3.1 * measured.std(ddof=1) / math.sqrt(len(measured))  # 99 % of t with 11 degrees of freedom
    assert abs(measured.mean() - expected) <= half_width
    assert half_width < 0.15 * expected, "an interval this wide shows nothing"


@pytest.mark.parametrize(
    "keep_alive", [0.1, *(pytest.param(seconds, marks=pytest.mark.slow) for seconds in (0.0, 0.5))]
)
def test_one_model_that_leaves_when_idle(keep_alive: float) -> None:
    rate = 5.0
    rho, asleep = rate * SERVICE, math.exp(-rate * keep_alive)
    first, second = LOAD * asleep, LOAD**2 * asleep
    wait = rate * SERVICE**2 / (2 * (1 - rho)) + (2 * first + rate * second) / (2 * (1 + rate * first))
    agrees(times(rate, 1, keep_alive), wait + SERVICE)


@pytest.mark.slow
def test_two_models_that_take_turns() -> None:
    rate = 4.0
    mean = SERVICE + LOAD / 2
    square = (SERVICE**2 + (SERVICE + LOAD) ** 2) / 2
    agrees(times(rate, 2, None), rate * square / (2 * (1 - rate * mean)) + mean)
