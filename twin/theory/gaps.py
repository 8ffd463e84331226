"""The gaps between theory and simulation: one named factor for each step from the paper's formula to the measurement.

    eq. 6 at T̄(B; N)  × finite_horizon × length_distribution × exposed_communication × barrier
                      × unexplained × start_up × in_flight  =  eq. 21

Each factor is a ratio of two throughputs, so the product is exact whatever the numbers.
"""

from __future__ import annotations

from dataclasses import replace

from twin.theory.cycle import CycleModel
from twin.theory.paper import PaperModel

NAMES = {
    "finite_horizon": "the paper averages the load over a finite run from empty caches; here its limit",
    "length_distribution": "exact mean load of these lengths in place of the geometric formula",
    "exposed_communication": "m microbatches cannot always hide the round trip",
    "barrier": "each step waits for the slowest of the attention instances",
    "unexplained": "steady-state simulation over barrier-aware theory: sampling noise and what the theory leaves out",
    "start_up": "caches start empty, so the first steps are quicker",
    "in_flight": "eq. 21 does not count tokens of requests still in flight",
}


def decompose(
    paper: PaperModel,
    cycle: CycleModel,
    ratio: float,
    instances: int,
    *,
    steady: float,
    generated: float,
    measured: float,
) -> dict[str, float]:
    """The factors from `paper.throughput(ratio)` to `measured` (eq. 21), in order.

    `steady`: simulated throughput per instance. `generated`: over the span of eq. 21, counting every token.
    """
    chain = {
        "finite_horizon": replace(paper, requests=None).throughput(ratio),
        "length_distribution": cycle.throughput_unlimited_overlap(ratio),
        "exposed_communication": cycle.throughput_at_mean_load(ratio),
        "barrier": cycle.throughput(ratio, instances),
        "unexplained": steady,
        "start_up": generated,
        "in_flight": measured,
    }
    factors, before = {}, paper.throughput(ratio)
    for name, after in chain.items():
        factors[name] = after / before
        before = after
    return factors
