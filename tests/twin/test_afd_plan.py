"""What a point of an AFD sweep is given: its bundle, its requests, and how long its steady state is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papers.afd.reproduction import BASELINE
from scenarios.afd import Topology, check_scenario, parse_ratios
from scenarios.reading import apply
from twin.afd.bundle import Bundle, Supply, step_table
from twin.afd.plan import BundlePlan, make_plan
from twin.afd.point import SteadyState, simulate, steady_state
from workloads.traces import Trace

FIXED = {
    "workload.prefill": {"distribution": "fixed", "mean": 100},
    "workload.decode": {"distribution": "fixed", "mean": 40},
}
FROM_TRACE = {"workload.prefill": None, "workload.decode": None, "workload.trace": {"path": "rows.csv"}}


def plan_of(trace: Trace | None = None, **settings: Any) -> BundlePlan:
    document = apply(BASELINE, {"batch_size": 16, "requests_per_instance": 100, "workload.decode.mean": 40, **settings})
    return make_plan(check_scenario(document, {}, Path("afd")), Path(), trace)


def ratio(text: str) -> Topology:
    (topology,) = parse_ratios(text)
    return topology


def test_constant_lengths() -> None:
    """A slot carries 100 to 139 tokens: 19.5 above its prompt in the mean, and four times that is the warm-up."""
    plan = plan_of(**FIXED)
    assert (plan.slot_load, plan.resident_prefill) == (119.5, 100)
    assert (plan.warm_up, plan.period, len(plan.cycle.phases)) == (78, 40, 40)
    stationary = plan_of(**FIXED, start="stationary")
    assert (stationary.period, len(stationary.cycle.phases)) == (1, 1)


def test_long_answers_hold_their_slots_for_longer() -> None:
    """Prompts of 10 and 50 with answers of 1 and 9: nine steps in ten are of the second."""
    trace = Trace("rows", None, np.array([10, 50]), np.array([1, 9]))
    plan = plan_of(trace, **FROM_TRACE)
    assert plan.resident_prefill == pytest.approx(0.1 * 10 + 0.9 * 50)
    # Ages are 0 in one step of ten, and 0 to 8 in nine.
    assert plan.slot_load == pytest.approx(0.1 * 10 + 0.9 * (50 + 4))
    assert (plan.warm_up, plan.period) == (15, 1)


def test_a_bundle_at_a_ratio() -> None:
    config = plan_of(layers=4, microbatches=3, refill="least_loaded", fast_forward=False).config(ratio("7/2"))
    assert (config.attention_instances, config.ffn_instances, config.batch_size) == (7, 2, 16)
    assert (config.microbatches, config.layers, config.fast_forward) == (3, 4, False)
    assert config.refill.__name__ == "refill_least_loaded"
    # Table 4 of the paper, a quarter in each of four passes.
    assert config.latency.attention == pytest.approx((0.00165 / 4, 50 / 4))
    assert config.latency.ffn == pytest.approx((0.083 / 4, 100 / 4))
    assert config.latency.communication == pytest.approx((0.022 / 4, 20 / 4))


def test_a_closed_loop_has_requests_to_stay_full() -> None:
    """Three instances answer 100 each, and 2 · 16 slots of each are full when the last one ends."""
    supply = plan_of(**FIXED).supply(ratio("3"))
    assert (len(supply.prefill), len(supply.decode), supply.completions) == (396, 396, 300)
    assert (set(supply.prefill.tolist()), set(supply.decode.tolist())) == ({100}, {40})
    assert supply.arrivals is None


def test_a_stationary_start_is_in_mid_life() -> None:
    supply = plan_of(**FIXED, start="stationary").supply(ratio("3"))
    resident, fresh = slice(0, 96), slice(96, None)
    assert set((supply.prefill + supply.decode).tolist()) == {140}
    ages = supply.prefill[resident] - 100
    assert (ages.min() >= 0, ages.max() <= 39, len(set(ages.tolist())) > 20) == (True, True, True)
    assert set(supply.prefill[fresh].tolist()) == {100}
    again = plan_of(**FIXED, start="stationary").closed_supply(ratio("3"), 300, stationary=True, stream=1)
    assert again.prefill.tolist() != supply.prefill.tolist()


def test_open_arrivals_come_at_their_rate() -> None:
    """The rate is an instance's: three come three times as fast."""
    arrivals = {"process": "poisson", "rate": 0.01}
    supply = plan_of(**{"workload.arrivals": arrivals, "requests_per_instance": 2000}).supply(ratio("3"))
    assert (len(supply.prefill), len(supply.arrivals), supply.completions) == (6000, 6000, 6000)
    assert supply.arrivals[-1] == pytest.approx(6000 / 0.03, rel=5 / np.sqrt(6000))
    assert supply.decode.mean() == pytest.approx(40, rel=0.1)


def test_a_trace_s_content_is_its_digest() -> None:
    rows = np.array([10, 50, 70]), np.array([1, 9, 3])
    times = np.array([0.0, 1.0, 2.0])
    contents = [(None, *rows), (times, *rows), (2 * times, *rows), (None, rows[0] + 1, rows[1]),
                (None, rows[0], rows[1] + 1)]  # fmt: skip
    digests = [plan_of(Trace("rows", *content), **FROM_TRACE).trace_digest for content in contents]
    assert len(set(digests)) == 5
    assert plan_of(Trace("other", None, *rows), **FROM_TRACE).trace_digest == digests[0]
    assert plan_of().trace_digest is None


def steady_from_the_first_step(plan: BundlePlan, topology: Topology, supply: Supply) -> SteadyState | None:
    config = plan.config(topology)
    records = Bundle(config, supply).run()
    return steady_state(config, supply, records, step_table(records), slot_load=plan.slot_load, warm_up=0)


@pytest.mark.parametrize(("alpha", "precise"), [(0.00165, True), (0.0165, False)])
def test_a_run_too_short_to_settle_is_followed_by_longer_ones(alpha: float, precise: bool) -> None:
    """Of 125 steps, and a warm-up of 156, the longest answers miss more than half a per cent of the load. The run of
    twice the length will do if its interval is narrow; if not, there is one of eight times.
    """
    plan, topology = plan_of(**{"latency.attention.alpha": alpha}), ratio("2")
    supplies = (plan.closed_supply(topology, 200 * n, stationary=True, stream=stream) for n, stream in ((2, 1), (8, 2)))
    twice, eightfold = (steady_from_the_first_step(plan, topology, supply) for supply in supplies)
    assert (twice.relative_half_width < 0.005) == precise
    assert simulate(plan, topology).measured.steady == (twice if precise else eightfold)


def test_a_stationary_start_leaves_no_step_out() -> None:
    plan, topology = plan_of(start="stationary"), ratio("2")
    steady = steady_from_the_first_step(plan, topology, plan.supply(topology))
    assert simulate(plan, topology).measured.steady == steady
