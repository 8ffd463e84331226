"""Section 4.3, figure 4: isolated decode workers and a shared pool of as many, under skew over models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from papers.sun.node import Load, Outcome, Service, outcomes, scenario
from papers.sun.published import ISOLATED, SHARED, Placement, skew_facts

SKEWS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Zipf exponents."""

ANSWER = 512
"""Tokens of an answer: appendix A.2 meets its target, which our text lacks, with 511.8 on average."""

CONFIDENCE = 0.95

Floats = NDArray[np.float64]
Result = dict[str, Any]
Point = tuple[Placement, float]


def simulate(service: Service, rate: float, placement: Placement, zipf: float, replications: int) -> list[Outcome]:
    return outcomes(scenario(service, Load(rate, ANSWER, zipf), placement), replications)


def summarise_skew(curves: Mapping[Point, Sequence[Outcome]], rate: float) -> Result:
    """Curves over skew, and the paper's sizes beside the results."""
    replications = len(next(iter(curves.values())))
    return {
        "rate": rate,
        "answer": ANSWER,
        "replications": replications,
        "points": [_point(placement, zipf, runs) for (placement, zipf), runs in curves.items()],
        "sizes": _sizes(curves),
        "falls": {metric: _falls(curves, metric) for metric in ("throughput", "interactivity")},
        "shared_change": {
            metric: _interval(_ratio(curves, metric, (SHARED, max(SKEWS)), (SHARED, min(SKEWS))))
            for metric in ("throughput", "interactivity")
        },
    }


def _sizes(curves: Mapping[Point, Sequence[Outcome]]) -> list[Result]:
    """The sizes by both averages, since the paper does not say whether interactivity or TPOT is averaged."""
    facts, worst, even = skew_facts(), max(SKEWS), min(SKEWS)
    shared: Point = (SHARED, worst)
    isolated: Point = (ISOLATED, worst)
    uniform: Point = (ISOLATED, even)
    compared = [
        ("isolated_throughput_change", "throughput, isolated against uniform", "throughput", isolated, uniform),
        ("shared_throughput_gain", "throughput, shared against isolated", "throughput", shared, isolated),
        ("shared_interactivity_gain", "interactivity, shared against isolated", "interactivity", shared, isolated),
        ("shared_interactivity_gain", "the same by mean TPOT, shared against isolated", "tpot", isolated, shared),
    ]
    return [
        {"what": label, "published": facts[fact], **_interval(_ratio(curves, metric, over, under))}
        for fact, label, metric, over, under in compared
    ]


def _interval(changes: Floats) -> Result:
    from scipy.special import stdtrit

    mean, count = float(changes.mean()), len(changes)
    reach = math.nan
    if count > 1:
        deviation = float(changes.std(ddof=1))
        reach = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) * deviation * math.sqrt(1 + 1 / count)
    return {"predicted": mean, "one_run": [mean - reach, mean + reach]}


def _ratio(curves: Mapping[Point, Sequence[Outcome]], metric: str, over: Point, under: Point) -> Floats:
    """Relative change from `under` to `over` in each replication, which both serve the same arrivals."""
    pairs = zip(curves[over], curves[under], strict=True)
    return np.array([getattr(above, metric) / getattr(below, metric) - 1 for above, below in pairs])


def _falls(curves: Mapping[Point, Sequence[Outcome]], metric: str) -> bool:
    curve = [np.mean([getattr(run, metric) for run in curves[ISOLATED, zipf]]) for zipf in SKEWS]
    return bool(np.all(np.diff(curve) < 0))


def _point(placement: Placement, zipf: float, runs: Sequence[Outcome]) -> Result:
    table = [asdict(outcome) for outcome in runs]
    return {
        "placement": placement,
        "zipf": zipf,
        **{name: float(np.mean([row[name] for row in table])) for name in table[0]},
    }
