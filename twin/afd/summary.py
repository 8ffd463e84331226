"""The summary of one configuration of a sweep: the theory's numbers, the simulation's, and the curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from twin.afd.plan import BundlePlan
from workloads.pairs import JointEmpirical

CURVE_POINTS = 96
TRACE_BLOCKS = 40
SEARCHED = 0.25, 256.0
"""Range of ratios of the search for the barrier-aware optimum; per card wider by √(c_F/c_A), like r_peak."""


def theory_summary(plan: BundlePlan) -> dict[str, Any]:
    """The results of eq. 12-20, the same with the exact load of the lengths, and the barrier-aware optimum."""
    paper = plan.paper
    limit = replace(paper, requests=None)
    best = plan.cycle.best_ratio(*SEARCHED)
    interval = _load_interval(plan)
    return {
        "r_star": paper.r_star,
        "regime": paper.regime,
        "r_attention": paper.r_attention,
        "r_communication": paper.r_communication,
        "r_critical": paper.r_critical,
        "r_peak": paper.r_peak,
        "throughput_at_r_star": paper.throughput_at_optimum,
        "mean_token_load": paper.mean_load,
        "horizon_steps": paper.horizon_steps,
        "t_attention": paper.t_attention,
        "t_communication": paper.t_communication,
        "t_ffn_at_r_star": paper.t_ffn(paper.r_star),
        "mean_token_load_limit": limit.mean_load,
        "r_star_limit": limit.r_star,
        "mean_prefill": plan.lengths.mean_prefill,
        "mean_decode": plan.lengths.mean_decode,
        "slot_load_renewal": plan.slot_load,
        "slot_load_renewal_interval": None if interval is None else list(interval),
        "mean_token_load_renewal": plan.slot_load * paper.batch_size,
        "r_star_renewal": paper.r_star_at(plan.slot_load * paper.batch_size),
        "r_star_renewal_interval": None
        if interval is None
        else [paper.r_star_at(load * paper.batch_size) for load in interval],
        "r_star_barrier": best,
        "throughput_at_r_star_barrier": plan.cycle.throughput(best),
        **_theory_per_card(plan, best),
    }


def _theory_per_card(plan: BundlePlan, best_per_instance: float) -> dict[str, Any]:
    """The optima of both theories, and the throughput there, with cards counted in place of instances."""
    cards = plan.cards.attention, plan.cards.ffn
    published = plan.paper.r_star_per_card(*cards)
    best = best_per_instance
    if plan.cards.attention != plan.cards.ffn:
        share = cards[1] / cards[0]
        low, high = SEARCHED[0] * min(1, math.sqrt(share)), SEARCHED[1] * max(1, math.sqrt(share))
        best = plan.cycle.best_ratio(low, high, attention_cards=cards[0], ffn_cards=cards[1])
    return {
        "r_star_per_card": published,
        "regime_per_card": plan.paper.regime_per_card(*cards),
        "throughput_per_card_at_r_star": plan.paper.throughput_per_card(published, *cards),
        "r_star_barrier_per_card": best,
        "throughput_per_card_at_r_star_barrier": plan.cycle.throughput_per_card(best, *cards),
    }


def simulation_summary(points: Sequence[dict[str, Any]], theory: dict[str, Any]) -> dict[str, Any]:
    """The peak of the simulated points, the crossing of their idle ratios, and the cost of the gaps between ratios.

    `best_*` uses the steady state, or eq. 21 without one; None if no point fits in memory. `best_range`: ratios that
    the 95 % intervals cannot tell apart. `discreteness`: loss of the published curve between the swept ratios.
    """
    if not points:
        return {}
    feasible = [point for point in points if point["fits"] is not False]
    by_paper = max(points, key=lambda point: point["throughput_per_instance"])
    best = _best(feasible, "throughput_per_instance")
    best_per_card = _best(feasible, "throughput_per_card")
    curve = max(point["throughput_per_instance_theory"] for point in points)
    return {
        **best,
        "best_over_r_star": best["best_ratio"] / theory["r_star"] if feasible else None,
        "best_ratio_eq_21": by_paper["ratio"],
        **{f"{key}_per_card": value for key, value in best_per_card.items()},
        "idle_crossing": idle_crossing(points),
        "discreteness": curve / theory["throughput_at_r_star"] - 1,
    }


def _best(points: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The point with the highest steady `metric`, and the ratios that its 95 % interval cannot tell from it."""
    if not points:
        return dict.fromkeys(("best_ratio", "best_topology", "best_range", "best_throughput"))
    steady = [point for point in points if point[f"{metric}_steady"] is not None]
    if not steady:
        best = max(points, key=lambda point: point[metric])
        return _as_best(best, best[metric], [best["ratio"]])
    best = max(steady, key=lambda point: point[f"{metric}_steady"])
    floor = _interval_end(best, metric, 0)
    rivals = [point["ratio"] for point in steady if _interval_end(point, metric, 1) >= floor]
    return _as_best(best, best[f"{metric}_steady"], [*rivals, best["ratio"]])


def _as_best(point: dict[str, Any], throughput: float, rivals: Sequence[float]) -> dict[str, Any]:
    return {
        "best_ratio": point["ratio"],
        "best_topology": point["topology"],
        "best_range": [min(rivals), max(rivals)],
        "best_throughput": throughput,
    }


def _interval_end(point: dict[str, Any], metric: str, end: int) -> float:
    """Lower (0) or upper (1) end of a steady point's interval, which is kept per instance, in the metric's unit."""
    ratio: float = point["throughput_ci"][end] / point["throughput_per_instance_steady"]
    return ratio * float(point[f"{metric}_steady"])


def idle_crossing(points: Sequence[dict[str, Any]]) -> float | None:
    """The ratio at which attention and FFN idle alike, interpolated in log r; None if they do not cross in the
    sweep."""
    ordered = sorted(points, key=lambda point: point["ratio"])
    for left, right in itertools.pairwise(ordered):
        before = left["idle_attention"] - left["idle_ffn"]
        after = right["idle_attention"] - right["idle_ffn"]
        if before <= 0 < after:
            share = before / (before - after)
            return float(math.exp((1 - share) * math.log(left["ratio"]) + share * math.log(right["ratio"])))
    return None


def curves(plan: BundlePlan, ratios: Sequence[float]) -> dict[str, list[float]]:
    """The theory's curves over the swept range, for figures."""
    low, high = min(ratios), max(ratios)
    if low == high:
        low, high = low / 2, high * 2
    grid = [float(ratio) for ratio in np.geomspace(low, high, CURVE_POINTS)]
    paper, cycle = plan.paper, plan.cycle
    steps = [cycle.step_time(ratio) for ratio in grid]
    batch = plan.scenario.batch_size
    return {
        "ratio": grid,
        "theory": [paper.throughput(ratio) for ratio in grid],
        "barrier": [ratio * batch / ((ratio + 1) * step) for ratio, step in zip(grid, steps, strict=True)],
        "t_attention": [paper.t_attention] * len(grid),
        "t_communication": [paper.t_communication] * len(grid),
        "t_ffn": [paper.t_ffn(ratio) for ratio in grid],
        "t_step": steps,
    }


def _load_interval(plan: BundlePlan) -> tuple[float, float] | None:
    """95 % interval of θ when it was estimated from a trace, by blocks: requests near in time are alike."""
    lengths = plan.lengths
    if not isinstance(lengths, JointEmpirical) or len(lengths) < TRACE_BLOCKS:
        return None
    return lengths.renewal_load_interval(block=len(lengths) // TRACE_BLOCKS)
