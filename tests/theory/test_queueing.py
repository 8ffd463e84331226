"""Degenerate bundles are queues that others have solved: one instance, one slot, one microbatch.

A decode step then takes a constant time s, a request's service is s·D, and the waiting time of Poisson arrivals is
that of Pollaczek and Khinchine: W = λ E[S²] / (2 (1 − ρ)). The estimate's error is taken from independent
replications.
"""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.stages import PassLatency
from reports.metrics import student_quantile
from twin.afd.bundle import Bundle, BundleConfig, Supply, step_table
from twin.afd.point import request_times
from workloads.arrivals import Poisson
from workloads.lengths import Fixed, Geometric, Lengths

STEP = 0.5
ONE_SLOT = BundleConfig(1, 1, 1, PassLatency((0.0, STEP), (0.0, 0.0), (0.0, 0.0)), microbatches=1)


def replicate(decode: Lengths, load: float, requests: int, seed: int) -> tuple[float, float, float]:
    """Mean wait, mean number in the system over time, and arrival rate × mean time in the system."""
    rng = np.random.default_rng(seed)
    rate = load / (STEP * decode.mean)
    arrivals = Poisson(rate).times(rng, requests)
    supply = Supply.of([0] * requests, decode.sample(rng, requests).tolist(), arrivals.tolist())
    records = Bundle(ONE_SLOT, supply).run()
    # One server, first come first served: completions come in order of arrival.
    times = request_times(ONE_SLOT, supply, records, step_table(records))
    end = times.finish[-1]
    events = np.concatenate((arrivals, times.finish))
    order = np.argsort(events, kind="stable")
    population = np.cumsum(np.concatenate((np.ones(requests), -np.ones(requests)))[order])
    area = float((population[:-1] * np.diff(events[order])).sum())
    return float((times.seated - arrivals).mean()), area / end, requests / end * float((times.finish - arrivals).mean())


@pytest.mark.parametrize(
    "decode", [pytest.param(Fixed(4), id="M/D/1", marks=pytest.mark.slow), pytest.param(Geometric(4.0), id="M/Geo/1")]
)
@pytest.mark.parametrize("load", [pytest.param(0.5, marks=pytest.mark.slow), 0.8])
def test_waiting_time_of_pollaczek_and_khinchine(decode: Lengths, load: float) -> None:
    service = STEP * decode.mean
    second_moment = STEP**2 * (decode.variance + decode.mean**2)
    expected = load / service * second_moment / (2 * (1 - load))
    waits = np.array([replicate(decode, load, 6000, seed)[0] for seed in range(12)])
    error = student_quantile(0.999, 11) * waits.std(ddof=1) / np.sqrt(12)
    assert abs(waits.mean() - expected) < error
    assert error < 0.15 * expected


def test_little_s_law_holds_on_every_run() -> None:
    for seed in range(5):
        _, population, flow = replicate(Geometric(4.0), 0.7, 500, seed)
        assert population == pytest.approx(flow, rel=1e-9)
