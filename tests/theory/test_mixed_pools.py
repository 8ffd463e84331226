"""Two engines of different speed behind one router, compared with queueing theory and a Markov chain solved by brute
force.

Each is an M/M/1 queue as in `test_serving_queues`: one request at a time, of one prompt token and a geometric number of
steps of constant time.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.linalg import spsolve

from reports.metrics import controlled_mean
from tests.theory.queues import constant, plan_of, servers, simulated
from twin.serving.plan.plan import ServingPlan
from workloads.arrivals import Replay
from workloads.generator import Workload
from workloads.lengths import Fixed, Geometric
from workloads.pairs import Independent

STEPS = 200
STEP = {"fast": 1e-3, "slow": 3e-3}
SPEED = {"fast": 3.0, "slow": 1.0}
"""In proportion, and without rounding, so that equal delays are equal."""

RATE = {name: 1 / (STEPS * step) for name, step in STEP.items()}
"""Requests a second that each engine can serve."""

REPLICATIONS, CUSTOMERS, WARM_UP = 10, 2000, 200
PLACES = 45
"""Requests at each engine in the truncated chain."""


def plan(routing: str) -> ServingPlan:
    pools = [{"name": name, "speed": SPEED[name], "step_time": constant(step)} for name, step in STEP.items()]
    return plan_of(engine=servers(1), system={"routing": routing, "pools": pools})


def check_mean_time(routing: str, rate: float, expected: float) -> None:
    """Compare the mean time in the system with its expectation. All requests have the same limit: sizes are not known.

    The noise is reduced by regressing on the load that was really drawn, whose expectation is known.
    """
    means, excess = [], []
    for seed in range(REPLICATIONS):
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1 / rate, CUSTOMERS)
        workload = Workload(Independent(Fixed(1), Geometric(STEPS)), Replay(np.cumsum(gaps)), max_tokens=STEPS * 40)
        columns = simulated(plan(routing), seed, workload=workload, requests=CUSTOMERS)
        came = columns["id"] >= WARM_UP
        means.append((columns["last_token"] - columns["arrival"])[came].mean())
        excess.append(columns["output_tokens"].mean() / STEPS - gaps.mean() * rate)
    estimate = controlled_mean(np.array(means), np.array(excess), 0.0, confidence=0.999)
    assert abs(estimate.mean - expected) <= estimate.half_width
    assert estimate.half_width < 0.2 * expected, "an interval this wide shows nothing"


@pytest.mark.parametrize("load", [pytest.param(0.4, marks=pytest.mark.slow), 0.7])
def test_a_split_in_proportion_to_speed(load: float) -> None:
    """Each is an M/M/1 queue with its share of the arrivals: T = Σ p / (μ - p λ)."""
    total = sum(RATE.values())
    rate = load * total
    expected = sum(served / total / (served - rate * served / total) for served in RATE.values())
    check_mean_time("weighted_random", rate, expected)


def chain(rate: float, choices: np.ndarray) -> float:
    """Mean time in the system of the chain whose arrivals join engine `chosen[turn, fast, slow]`; turns alternate."""
    size = PLACES + 1

    def state(turn: int, fast: int, slow: int) -> int:
        return (turn * size + fast) * size + slow

    moves = []
    for turn, fast, slow in np.ndindex(2, size, size):
        here, engine = state(turn, fast, slow), choices[turn, fast, slow]
        if (fast, slow)[engine] < PLACES:
            moves.append((here, state(1 - turn, fast + (engine == 0), slow + (engine == 1)), rate))
        if fast:
            moves.append((here, state(turn, fast - 1, slow), RATE["fast"]))
        if slow:
            moves.append((here, state(turn, fast, slow - 1), RATE["slow"]))
    start, end, rates = (np.array(column) for column in zip(*moves, strict=True))
    count = 2 * size * size
    flows = sparse.coo_matrix((rates, (end, start)), (count, count)).tolil()
    flows.setdiag(-np.bincount(start, rates, count))
    flows[0, :] = 1.0
    right = np.zeros(count)
    right[0] = 1.0
    shares = spsolve(flows.tocsr(), right).reshape(2, size, size).sum(axis=0)
    assert shares[-1].sum() + shares[:, -1].sum() < 1e-9, "the truncation matters"
    places = np.arange(size)
    return float((shares.sum(axis=1) @ places + shares.sum(axis=0) @ places) / rate)  # Little's law


def joins(routing: str) -> np.ndarray:
    """The engine that an arrival joins, 0 for the fast one; the one whose turn it is among equals."""
    added = 0 if routing == "weighted_least_loaded" else 1
    speed = {"fast": 1.0, "slow": 1.0} if routing == "least_loaded" else SPEED
    turn, fast, slow = np.indices((2, PLACES + 1, PLACES + 1))
    delays = (fast + added) / speed["fast"], (slow + added) / speed["slow"]
    return np.where(delays[0] == delays[1], turn, delays[1] < delays[0])


@pytest.mark.parametrize(
    "routing",
    [
        "shortest_expected_delay",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("weighted_least_loaded", "least_loaded")),
    ],
)
def test_joining_the_shorter_delay(routing: str) -> None:
    """The chain of requests at both engines, solved for its stationary distribution.

    At this load the three differ: 0.352, 0.410 and 0.467 s.
    """
    rate = 0.4 * sum(RATE.values())
    check_mean_time(routing, rate, chain(rate, joins(routing)))


def test_the_chain_of_one_engine_is_m_m_1() -> None:
    """All arrivals at the fast engine: 1 / (μ - λ)."""
    assert chain(3.0, np.zeros((2, PLACES + 1, PLACES + 1), dtype=int)) == pytest.approx(1 / (RATE["fast"] - 3.0))
