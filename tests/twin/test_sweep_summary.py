"""The summary of a sweep, from points written by hand and from the theory's own functions."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from papers.afd.reproduction import BASELINE
from scenarios.afd import Topology, check_scenario, parse_ratios
from scenarios.reading import apply
from twin.afd.plan import BundlePlan, curves, idle_crossing, make_plan, simulation_summary, theory_summary
from twin.afd.point import describe, simulate
from workloads.traces import Trace


def point(ratio: float, steady: float | None, eq_21: float, **changes: Any) -> dict[str, Any]:
    """A point whose 95 % interval is 10 % to either side, with five cards for each two instances."""
    return {
        "ratio": ratio,
        "topology": f"{ratio:g}A-1F",
        "throughput_per_instance": eq_21,
        "throughput_per_instance_steady": steady,
        "throughput_per_instance_theory": 2 * eq_21,
        "throughput_per_card": 0.4 * eq_21,
        "throughput_per_card_steady": None if steady is None else 0.4 * steady,
        "throughput_ci": None if steady is None else [0.9 * steady, 1.1 * steady],
        "idle_attention": 0.0,
        "idle_ffn": 0.0,
        "fits": None,
        **changes,
    }


THEORY = {"r_star": 5.0, "throughput_at_r_star": 40.0}


def test_the_best_point_and_its_rivals() -> None:
    """100 is best, with 90 as the lower end of its interval: 85 reaches to 93.5 and 80 to 88."""
    points = [point(2, 80, 17), point(4, 100, 15), point(8, 85, 16), point(16, 60, 12)]
    summary = simulation_summary(points, THEORY)
    assert summary == {
        "best_ratio": 4,
        "best_topology": "4A-1F",
        "best_range": [4, 8],
        "best_throughput": 100,
        "best_over_r_star": 0.8,
        "best_ratio_eq_21": 2,
        "best_ratio_per_card": 4,
        "best_topology_per_card": "4A-1F",
        "best_range_per_card": [4, 8],
        "best_throughput_per_card": 40.0,
        "idle_crossing": None,
        "discreteness": pytest.approx(34 / 40 - 1),
    }


def test_cards_may_choose_another_point() -> None:
    points = [point(2, 80, 17), point(4, 100, 15, throughput_per_card_steady=20.0)]
    summary = simulation_summary(points, THEORY)
    assert (summary["best_ratio"], summary["best_range"]) == (4, [4, 4])
    assert (summary["best_ratio_per_card"], summary["best_throughput_per_card"]) == (2, 32.0)


def test_points_that_do_not_fit_are_never_the_best() -> None:
    points = [point(2, 80, 15, fits=True), point(4, 100, 17, fits=False)]
    summary = simulation_summary(points, THEORY)
    assert (summary["best_ratio"], summary["best_range"], summary["best_ratio_eq_21"]) == (2, [2, 2], 4)
    none = simulation_summary([point(4, 100, 17, fits=False)], THEORY)
    assert [none[name] for name in ("best_ratio", "best_over_r_star", "best_throughput_per_card")] == [None] * 3
    assert simulation_summary([], THEORY) == {}


def test_a_steady_point_goes_before_one_without() -> None:
    points = [point(2, None, 17), point(4, 10, 15), point(8, None, 16)]
    assert simulation_summary(points, THEORY)["best_throughput"] == 10
    short = [point(2, None, 15), point(4, None, 17)]
    summary = simulation_summary(short, THEORY)
    assert (summary["best_ratio"], summary["best_range"], summary["best_throughput"]) == (4, [4, 4], 17)


def test_where_both_sides_idle_alike() -> None:
    """From 0.3 less to 0.1 more between ratios of 2 and 8: three quarters of the way, in log r."""
    points = [
        point(8, 1, 1, idle_attention=0.2, idle_ffn=0.1),
        point(1, 1, 1, idle_attention=0.0, idle_ffn=0.5),
        point(2, 1, 1, idle_attention=0.1, idle_ffn=0.4),
    ]
    assert idle_crossing(points) == pytest.approx(2 * 4**0.75)
    assert simulation_summary(points, THEORY)["idle_crossing"] == pytest.approx(2 * 4**0.75)
    assert idle_crossing(points[1:]) is None
    assert idle_crossing([point(1, 1, 1, idle_attention=0.5), point(2, 1, 1, idle_attention=0.6)]) is None
    touching = [point(4, 1, 1, idle_attention=0.2, idle_ffn=0.2), point(8, 1, 1, idle_attention=0.3)]
    assert idle_crossing(touching) == pytest.approx(4)


def plan_of(trace: Trace | None = None, **settings: Any) -> BundlePlan:
    document = apply(BASELINE, {"batch_size": 16, "requests_per_instance": 200, "workload.decode.mean": 40, **settings})
    return make_plan(check_scenario(document, {}, Path("afd")), Path(), trace)


def test_theory_of_everything() -> None:
    """Table 4 of the paper, B = 16, N = 200, prompts of 100 and answers of 40 in the mean, both geometric."""
    plan = plan_of()
    summary = theory_summary(plan)
    p, batch = 1 / 40, 16
    horizon = 200 / (batch * p)
    ramp = (1 - (1 - p) ** horizon) / (horizon * p)
    load, limit = batch * (100 + 39 * (1 - ramp)), batch * (100 + 39)

    def ratio(time: float) -> float:
        return (time - 100) / (0.083 * batch)

    peak = math.sqrt(100 / (0.083 * batch))
    assert summary["mean_token_load"] == pytest.approx(load)
    assert summary["mean_token_load_limit"] == pytest.approx(limit)
    assert summary["horizon_steps"] == horizon
    assert summary["t_attention"] == pytest.approx(0.00165 * load + 50)
    assert summary["t_communication"] == pytest.approx(0.022 * batch + 20)
    assert summary["r_attention"] == pytest.approx(ratio(0.00165 * load + 50))
    assert summary["r_communication"] == pytest.approx(ratio(0.022 * batch + 20))
    assert summary["r_critical"] == pytest.approx(max(summary["r_attention"], summary["r_communication"]))
    assert summary["r_star"] == summary["r_star_limit"] == summary["r_peak"] == pytest.approx(peak)
    assert summary["regime"] == summary["regime_per_card"] == "ffn-bottleneck"
    assert summary["t_ffn_at_r_star"] == pytest.approx(0.083 * peak * batch + 100)
    assert summary["throughput_at_r_star"] == pytest.approx(peak * batch / (peak + 1) / summary["t_ffn_at_r_star"])
    assert (summary["mean_prefill"], summary["mean_decode"]) == pytest.approx((100, 40))
    # A geometric answer seen at a random step has, by its lack of memory, 39 tokens in the mean: the paper's limit.
    assert summary["slot_load_renewal"] == pytest.approx(139)
    assert summary["mean_token_load_renewal"] == pytest.approx(139 * batch)
    assert summary["slot_load_renewal_interval"] is summary["r_star_renewal_interval"] is None
    best = summary["r_star_barrier"]
    assert summary["throughput_at_r_star_barrier"] == pytest.approx(plan.cycle.throughput(best))
    assert all(plan.cycle.throughput(best * factor) <= plan.cycle.throughput(best) for factor in (0.9, 1.1))
    assert summary["r_star_per_card"] == summary["r_star"]
    assert summary["throughput_per_card_at_r_star"] == pytest.approx(summary["throughput_at_r_star"])
    assert summary["r_star_barrier_per_card"] == best


def test_theory_of_unequal_cards() -> None:
    """An FFN instance of 16 cards moves the paper's peak by √16, and the barrier-aware one likewise."""
    plan = plan_of(**{"instances.ffn_cards": 16})
    summary = theory_summary(plan)
    assert summary["r_star_per_card"] == pytest.approx(4 * summary["r_peak"])
    peak = summary["r_star_per_card"]
    assert summary["throughput_per_card_at_r_star"] == pytest.approx(peak * 16 / (peak + 16) / plan.paper.t_ffn(peak))
    best = summary["r_star_barrier_per_card"]
    rate = summary["throughput_per_card_at_r_star_barrier"]
    assert rate == pytest.approx(plan.cycle.throughput_per_card(best, 1, 16))
    assert all(plan.cycle.throughput_per_card(best * factor, 1, 16) <= rate for factor in (0.9, 1.1))


def test_an_interval_of_the_load_by_blocks_of_a_trace() -> None:
    rng = np.random.default_rng(3)
    trace = Trace("drawn", None, rng.integers(1, 900, 405), rng.integers(1, 200, 405))
    no_lengths = {"workload.prefill": None, "workload.decode": None, "workload.trace": {"path": "drawn.csv"}}
    plan = plan_of(trace, **no_lengths)
    summary = theory_summary(plan)
    # θ is a ratio of sums over rows. Of 405 rows in 40 blocks each has ten, and five rows are left over.
    prefill, decode = trace.prefill_tokens, trace.decode_tokens
    token_steps = prefill * decode + decode * (decode - 1) / 2
    load = token_steps.sum() / decode.sum()
    residuals = (token_steps - load * decode)[:400].reshape(40, 10).mean(axis=1)
    reach = 1.959964 * residuals.std(ddof=1) / math.sqrt(40) / decode.mean()
    assert summary["slot_load_renewal"] == pytest.approx(load)
    assert summary["slot_load_renewal_interval"] == pytest.approx([load - reach, load + reach], rel=1e-6)
    ends = [plan.paper.r_star_at(16 * (load + sign * reach)) for sign in (-1, 1)]
    assert summary["r_star_renewal_interval"] == pytest.approx(ends, rel=1e-6)
    short = plan_of(Trace("few", None, np.array([9] * 39), np.array([3] * 39)), **no_lengths)
    assert theory_summary(short)["slot_load_renewal_interval"] is None


def test_curves() -> None:
    plan = plan_of()
    result = curves(plan, [1.0, 4.0, 16.0])
    assert result["ratio"] == pytest.approx([16 ** (i / 95) for i in range(96)])
    for i in (0, 50, 95):
        ratio = result["ratio"][i]
        assert result["theory"][i] == pytest.approx(plan.paper.throughput(ratio))
        assert result["t_step"][i] == pytest.approx(plan.cycle.step_time(ratio))
        assert result["barrier"][i] == pytest.approx(ratio * 16 / (ratio + 1) / plan.cycle.step_time(ratio))
        assert result["t_ffn"][i] == pytest.approx(0.083 * ratio * 16 + 100)
    assert set(result["t_attention"]) == {plan.paper.t_attention}
    assert set(result["t_communication"]) == {0.022 * 16 + 20}
    # One ratio is drawn from half to twice it.
    single = curves(plan, [6.0])["ratio"]
    assert (single[0], single[-1]) == pytest.approx((3.0, 12.0))


@pytest.mark.parametrize("arrivals", ["closed_loop", "poisson"])
def test_a_point_of_everything(arrivals: str) -> None:
    """Three attention instances of two cards feed two FFN instances of five."""
    changes: dict[str, Any] = {"instances.attention_cards": 2, "instances.ffn_cards": 5}
    if arrivals == "poisson":
        changes |= {"workload.arrivals": {"process": "poisson", "rate": 0.004}}
    plan = plan_of(**changes)
    (topology,) = parse_ratios("3/2")
    measured = simulate(plan, topology).measured
    document = describe(plan, topology, measured)
    assert (document["ratio"], document["attention_instances"], document["ffn_instances"], document["cards"]) == (
        1.5,
        3,
        2,
        16,
    )
    closed = arrivals == "closed_loop"
    rates = {
        "": measured.throughput,
        "_theory": plan.paper.throughput(1.5),
        "_barrier": plan.cycle.throughput(1.5, 3) if closed else None,
        "_steady": measured.steady.throughput if measured.steady else None,
    }
    for name, rate in rates.items():
        assert document[f"throughput_per_instance{name}"] == rate
        assert document[f"throughput_per_card{name}"] == (None if rate is None else pytest.approx(rate * 5 / 16))
    assert document["throughput_per_instance_generated"] == measured.throughput_generated
    assert document["requests"] == measured.requests == 600
    assert document["regime"] == "ffn-bottleneck"
    assert (document["attention_memory"], document["fits"]) == (None, None)
    if not closed:
        assert document["gaps"] is None
        return
    assert document["throughput_per_instance_steady_plain"] == measured.steady.plain
    assert document["throughput_ci"] == list(measured.steady.interval)
    gaps = document["gaps"]
    limit = replace(plan.paper, requests=None)
    assert gaps["finite_horizon"] == pytest.approx(limit.throughput(1.5) / plan.paper.throughput(1.5))
    assert gaps["in_flight"] == pytest.approx(measured.throughput / measured.throughput_generated)
    assert math.prod(gaps.values()) == pytest.approx(measured.throughput / plan.paper.throughput(1.5))


def test_seeds_follow_what_is_served_and_not_what_it_takes() -> None:
    topology = Topology(Fraction(3))
    seed = plan_of().seed(topology)
    assert seed == plan_of(**{"latency.ffn.beta": 7}).seed(topology)
    variants = [plan_of(seed=12345), plan_of(batch_size=8), plan_of(**{"workload.prefill.mean": 99})]
    assert len({seed, plan_of().seed(Topology(Fraction(4))), *(variant.seed(topology) for variant in variants)}) == 5


@pytest.mark.parametrize(("beta", "best"), [(0.03, 0.3), (40_000, 300.0)])
def test_the_search_for_unequal_cards_reaches_as_far_as_for_equal_ones(beta: float, best: float) -> None:
    """The FFN alone takes time, so the optimum is √(4 β / (α B)): below a half, and above 256, at four cards an FFN."""
    free = {"latency.attention": {"alpha": 0, "beta": 1e-6}, "latency.communication": {"alpha": 0, "beta": 0}}
    plan = plan_of(**free, **{"latency.ffn.beta": beta, "instances.ffn_cards": 4})
    assert best == pytest.approx(math.sqrt(4 * beta / (0.083 * 16)), rel=0.2)
    assert theory_summary(plan)["r_star_barrier_per_card"] == pytest.approx(
        math.sqrt(4 * beta / (0.083 * 16)), rel=0.01
    )
