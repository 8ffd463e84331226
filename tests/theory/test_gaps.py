"""The decomposition between the paper's curve and a measurement, each factor against a closed form."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from latency_models.stages import PassLatency
from twin.theory.cycle import CycleModel, LoadLaw, constant_load
from twin.theory.paper import NAMES, PaperModel, decompose

TURNS = [constant_load(10.0), constant_load(30.0)]
"""Two phases that take turns, as with constant lengths."""


@pytest.mark.parametrize(
    ("communication", "ffn", "microbatches", "expected"),
    [
        # Attention takes 0.5 · 10 + 2 = 7 and 0.5 · 30 + 2 = 17. Busy attention: 2 · 7 and 2 · 17 for two steps.
        ((0.125, 0.5), (0.25, 1.0), 2, (14 + 34) / 2 / 2),
        # A round trip of 12 is exposed in the first phase: 7 + 12 + 3 for two steps.
        ((0.125, 11.5), (0.25, 1.0), 2, (22 + 34) / 2 / 2),
        # A third microbatch hides it again: 3 · 7 and 3 · 17, and 7 + 12 + 3 = 22 is above the first.
        ((0.125, 11.5), (0.25, 1.0), 3, (22 + 51) / 2 / 3),
        # The FFN takes 0.25 · 8 + 12 = 14: 2 · 14 in the first phase, and 17 + 1 + 14 is below 2 · 17 in the second.
        ((0.125, 0.5), (0.25, 12.0), 2, (28 + 34) / 2 / 2),
        # One microbatch waits for everything in turn.
        ((0.125, 0.5), (0.25, 1.0), 1, (7 + 1 + 3 + 17 + 1 + 3) / 2),
        # One direction of the link takes 0.5 · (0.125 · 4 + 67.5) = 34: 4 · 34 is the longest in either phase.
        ((0.125, 67.5), (0.25, 1.0), 4, 4 * 34 / 4),
    ],
)
def test_step_time_at_mean_load(
    communication: tuple[float, float], ffn: tuple[float, float], microbatches: int, expected: float
) -> None:
    latency = PassLatency((0.5, 2.0), ffn, communication)
    model = CycleModel(latency, batch_size=4, microbatches=microbatches, phases=TURNS)
    assert model.step_time_at_mean_load(2.0) == expected
    assert model.rate(2.0, model.step_time_at_mean_load(2.0)) == pytest.approx(2 * 4 / 3 / expected)


@pytest.mark.parametrize(
    ("communication", "ffn", "expected"),
    [
        ((0.125, 0.5), (0.25, 1.0), 0.5 * 20 + 2),
        ((0.125, 12.0), (0.25, 1.0), 0.125 * 4 + 12),
        ((0.125, 0.5), (0.25, 11.0), 0.25 * 2 * 4 + 11),
    ],
)
def test_step_time_with_unlimited_overlap_is_the_slowest_stage(
    communication: tuple[float, float], ffn: tuple[float, float], expected: float
) -> None:
    model = CycleModel(PassLatency((0.5, 2.0), ffn, communication), batch_size=4, microbatches=2, phases=TURNS)
    assert model.step_time_unlimited_overlap(2.0) == expected
    assert model.rate(2.0, model.step_time_unlimited_overlap(2.0)) == pytest.approx(2 * 4 / 3 / expected)


def test_every_factor_against_a_closed_form() -> None:
    """p = 1/2, B = 4 and N = 8: the horizon is 8 / (4/2) = 4 steps.

    Loads: 4 · (3 + 1) = 16 in the limit, and 1 - (1 - p)^4 = 15/16 of a ramp over 4 p = 2 steps less before it. The
    one microbatch goes through attention, round trip and FFN one after the other. The load is uniform on 10 to 30, so
    that the largest of three has the mean 10 + 20 · 3/4.
    """
    latency = PassLatency((1.0, 2.0), (0.25, 0.5), (0.5, 1.0))
    paper = PaperModel(latency, batch_size=4, mean_prefill=3.0, mean_decode=2.0, requests=8)
    law = LoadLaw(np.array([10.0, 30.0]), np.array([0.0, 1.0]), 20.0)
    cycle = CycleModel(latency, batch_size=4, microbatches=1, phases=[law])
    ratio, round_trip, ffn = 1.5, 0.5 * 4 + 1.0, 0.25 * 1.5 * 4 + 0.5

    def per_instance(step_time: float) -> float:
        return ratio * 4 / ((ratio + 1) * step_time)

    times = {
        "published": 4 * (3 + 1 - 15 / 16 / 2) + 2.0,
        "finite_horizon": 16 + 2.0,
        "length_distribution": 20 + 2.0,
        "exposed_communication": 20 + 2.0 + round_trip + ffn,
        "barrier": 25 + 2.0 + round_trip + ffn,
    }
    steady, generated, measured = 0.0625, 0.078125, 0.05
    factors = decompose(paper, cycle, ratio, 3, steady=steady, generated=generated, measured=measured)
    names = list(times)
    for before, name in itertools.pairwise(names):
        assert factors[name] == pytest.approx(times[before] / times[name], rel=1e-5 if name == "barrier" else 1e-12)
    assert factors["unexplained"] == pytest.approx(steady / per_instance(times["barrier"]), rel=1e-5)
    assert factors["start_up"] == pytest.approx(generated / steady)
    assert factors["in_flight"] == pytest.approx(measured / generated)
    assert list(factors) == list(NAMES)
    assert math.prod(factors.values()) == pytest.approx(measured / per_instance(times["published"]))
