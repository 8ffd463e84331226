"""Bundles small enough to work out on paper: equal to the last digit. All times are dyadic, so floats are exact."""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.stages import PassLatency
from schedulers.bundle_slots import refill_least_loaded
from twin.afd.bundle import Bundle, BundleConfig, Supply, step_table
from twin.afd.point import measure, request_times

EXACT = PassLatency(attention=(0.25, 2.0), ffn=(0.5, 1.0), communication=(0.125, 0.375))
EACH_WAY = (0.125 + 0.375) / 2


@pytest.mark.parametrize("fast_forward", [True, False])
def test_one_slot_one_microbatch(fast_forward: bool) -> None:
    config = BundleConfig(1, 1, 1, EXACT, microbatches=1, fast_forward=fast_forward)
    records = Bundle(config, Supply.of([8, 8, 8], [4, 4, 4])).run()
    # Attention reads 8, 9, 10, 11 tokens; then the FFN takes one request; the round trip is half a unit.
    cycles = [0.25 * (8 + index) + 2.0 + EACH_WAY + 1.5 + EACH_WAY for index in range(4)] * 3
    assert [row[2] for row in records.steps] == list(np.cumsum(cycles))
    assert [row[5] for row in records.steps] == [8, 9, 10, 11] * 3
    measured = measure(config, Supply.of([8] * 3, [4] * 3), records, slot_load=9.5, warm_up=0, period=4)
    assert measured.total_time == 3 * sum(cycles[:4]) == 3 * (4 * 0.25 * 9.5 + 4 * 4.0)
    # Eq. 22: from the end of the first step to the end of the fourth, over 4 tokens.
    assert measured.tpot == sum(cycles[1:4]) / 4
    assert measured.tpot_gaps == sum(cycles[1:4]) / 3
    # Eq. 21: all three requests are the first ⌈0.8·3⌉; eq. 23: what is not attention is idle.
    assert measured.throughput == 12 / measured.total_time / 2
    attention = 3 * sum(0.25 * (8 + index) + 2.0 for index in range(4))
    assert measured.idle_attention == 1 - attention / measured.total_time
    assert measured.idle_ffn == 1 - 12 * 1.5 / measured.total_time


def test_two_microbatches_share_the_servers() -> None:
    config = BundleConfig(1, 1, 1, PassLatency((0.0, 4.0), (0.0, 2.0), (0.0, 1.0)), microbatches=2)
    records = Bundle(config, Supply.of([0, 0], [3, 3])).run()
    # Attention is the bottleneck: 0-4 4-8 8-12 12-16 16-20 20-24, and each step ends 3 after its attention.
    assert [(row[0], row[2]) for row in records.steps] == [(0, 7), (1, 11), (0, 15), (1, 19), (0, 23), (1, 27)]
    assert [row[3] for row in records.steps] == [0, 4, 1, 1, 1, 1]


def test_layers_cut_a_step_into_passes() -> None:
    once = BundleConfig(1, 1, 1, EXACT, microbatches=1)
    quarter = PassLatency((0.0625, 0.5), (0.125, 0.25), (0.03125, 0.09375))
    layered = BundleConfig(1, 1, 1, quarter, microbatches=1, layers=4)
    whole, cut = ([row[2] for row in Bundle(config, Supply.of([16], [3])).run().steps] for config in (once, layered))
    assert whole == cut


def test_open_arrivals_leave_slots_empty_and_wait_for_the_next_step() -> None:
    config = BundleConfig(1, 1, 2, PassLatency((0.0, 4.0), (0.0, 0.0), (0.0, 0.0)), microbatches=1)
    supply = Supply.of([0, 0, 0], [2, 1, 1], arrivals=[1.0, 2.0, 50.0])
    records = Bundle(config, supply).run()
    # Idle to 1; the second comes in mid-step and is seated at 5; then nobody until 50.
    assert [(row[1], row[2], row[7]) for row in records.steps] == [(1, 5, 1), (5, 9, 2), (50, 54, 1)]
    assert request_times(config, supply, records, step_table(records)).seated.tolist() == [1, 5, 50]


def test_a_closed_loop_stops_at_its_completions_with_full_slots() -> None:
    config = BundleConfig(1, 1, 2, EXACT, microbatches=1)
    records = Bundle(config, Supply.of([0] * 9, [3, 5] + [4] * 7, completions=3)).run()
    assert records.full_until is None
    assert all(row[7] == 2 for row in records.steps)
    assert len(records.steps) == 7


def test_least_loaded_refill_evens_out_the_loads() -> None:
    rng = np.random.default_rng(5)
    prefill, decode = (rng.lognormal(5, 1.2, 4000)).astype(int).tolist(), rng.geometric(0.05, 4000).tolist()

    def imbalance(**changes: object) -> float:
        config = BundleConfig(8, 1, 8, EXACT, microbatches=2, **changes)  # type: ignore[arg-type]
        steps = np.array(Bundle(config, Supply.of(prefill, decode, completions=3500)).run().steps)
        return float((steps[:, 5] / (steps[:, 6] / 8)).mean())

    assert imbalance(refill=refill_least_loaded) < 0.97 * imbalance()
