"""Figure 3 on any trace: whether its answers have geometric lengths, and what that does to r*. Figure 8 beside it.

The paper takes D ~ Geo(p) from pictures of four traces (3.3), and nothing else about D enters eq. 19. Here p is fitted
to the lengths of a trace, the fit is tested, and r* is computed from the trace's own lengths as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from papers.afd.reproduction import BASELINE
from papers.layout import claim
from scenarios.afd import check_scenario
from twin.afd.plan import make_plan
from twin.theory.paper import PaperModel
from workloads.checks import FloatArray, IntArray
from workloads.pairs import JointEmpirical
from workloads.traces import read_trace

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
CLOSELY = 0.05
"""Distance between two distribution functions up to which one "closely follows" the other; the paper names none."""
DRAWS = 199
SEED = 1


def reproduce(trace: Path) -> dict[str, Any]:
    """The document `twin.reproduction-afd/1` of a trace, in seconds."""
    recorded = read_trace(trace)
    decode = recorded.decode_tokens
    fit = geometric_fit(decode)
    pairs = JointEmpirical(recorded.prefill_tokens, decode)
    document = {
        "schema": "twin.reproduction-afd/1",
        "paper": "afd",
        "trace": str(trace),
        "requests": len(decode),
        "lengths": fit,
        "ratios": ratios(pairs),
        "latencies": latencies(),
    }
    return document | {"claims": claims(document)}


def geometric_fit(decode: IntArray) -> dict[str, Any]:
    """The geometric distribution on {1, 2, …} with the mean of these lengths, (n,), and how far they are from it.

    `distance` is Kolmogorov's. `p_value`: share of samples of that distribution, fitted again, that are at least as far
    from their fit (parametric bootstrap). `cv` of a geometric one is sqrt(1 − p). `survival`: P(D ≥ length) on a grid.
    """
    p = 1 / float(decode.mean())
    distance = _distance(decode, p)
    rng = np.random.default_rng(SEED)
    samples = (rng.geometric(p, len(decode)) for _ in range(DRAWS))
    farther = sum(_distance(sample, 1 / float(sample.mean())) >= distance for sample in samples)
    levels = np.array(LEVELS)
    lengths = np.unique(np.geomspace(1, decode.max(), 60).astype(np.int64))
    return {
        "mean": 1 / p,
        "p": p,
        "cv": float(decode.std() / decode.mean()),
        "cv_geometric": float(np.sqrt(1 - p)),
        "distance": distance,
        "p_value": (farther + 1) / (DRAWS + 1),
        "quantiles": [
            {"level": level, "trace": float(own), "geometric": float(fitted)}
            for level, own, fitted in zip(
                LEVELS, np.quantile(decode, levels, method="inverted_cdf"), _quantile(levels, p), strict=True
            )
        ],
        "survival": [
            {
                "length": int(length),
                "trace": float((decode >= length).mean()),
                "geometric": (1 - p) ** (int(length) - 1),
            }
            for length in lengths
        ],
    }


def _distance(lengths: IntArray, p: float) -> float:
    """The largest difference of lengths' distribution function and a geometric one: at a length, or just before."""
    values, counts = np.unique(lengths, return_counts=True)
    cumulative = np.cumsum(counts) / len(lengths)
    before = np.concatenate(([0.0], cumulative[:-1]))
    at_values, below_values = (np.abs(1 - (1 - p) ** (values - lag)) for lag in (0, 1))
    return float(max(np.abs(cumulative - at_values).max(), np.abs(before - below_values).max()))


def _quantile(levels: FloatArray, p: float) -> FloatArray:
    """Quantiles of the geometric distribution on {1, 2, …}, in the shape of `levels`; it is all 1 where p is 1."""
    if p >= 1:
        return np.ones_like(levels)
    result: FloatArray = np.maximum(np.ceil(np.log1p(-levels) / np.log1p(-p)), 1.0)
    return result


def ratios(pairs: JointEmpirical) -> list[dict[str, Any]]:
    """r* of eq. 19 (latencies and B of section 5.3) for three assumptions on lengths; eq. 6 at the trace's own load."""
    plan = make_plan(check_scenario(BASELINE, {}, Path("afd-paper")), Path(), None)
    model = PaperModel(plan.latency, BASELINE["batch_size"], pairs.mean_prefill, pairs.mean_decode)
    loads = {
        "geometric, independent of prompts (eq. 14)": model.mean_load / model.batch_size,
        "the trace's answers, independent of prompts": pairs.independent().renewal_load(),
        "the trace's prompts and answers together": pairs.renewal_load(),
    }
    own = model.batch_size * loads["the trace's prompts and answers together"]
    best = _throughput(model, model.r_star_at(own), own)
    rows = []
    for assumption, load in loads.items():
        ratio = model.r_star_at(model.batch_size * load)
        relative = _throughput(model, ratio, own) / best
        rows.append({"assumption": assumption, "slot_load": load, "r_star": ratio, "throughput": relative})
    return rows


def _throughput(model: PaperModel, ratio: float, load: float) -> float:
    """Eq. 6 at another mean token load of an instance than that of geometric lengths."""
    alpha, beta = model.latency.attention
    cycle = max(alpha * load + beta, model.t_communication, model.t_ffn(ratio))
    return ratio * model.batch_size / ((ratio + 1) * cycle)


def latencies() -> dict[str, list[list[float]]]:
    """Figure 8: lines of (tokens, cycles) to T = 200,000 for attention, and to B = 4,000 for FFN and communication."""
    latency = make_plan(check_scenario(BASELINE, {}, Path("afd-paper")), Path(), None).latency
    spans = {"attention": 200_000, "ffn": 4_000, "communication": 4_000}
    lines = {}
    for name, end in spans.items():
        alpha, beta = getattr(latency, name)
        lines[name] = [[0.0, beta], [float(end), alpha * end + beta]]
    return lines


def claims(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Figure 3's claim on this trace, and what r* owes to it."""
    fit, rows = document["lengths"], document["ratios"]
    geometric, own = rows[0]["r_star"], rows[-1]["r_star"]
    return [
        claim(
            "figure 3", "decode lengths closely follow a geometric distribution", f"distance ≤ {CLOSELY:g} (our bound)",
            f"{fit['distance']:.3f}, p = {fit['p_value']:.3f}", fit["distance"] <= CLOSELY,
            f"coefficient of variation {fit['cv']:.2f}, geometric {fit['cv_geometric']:.2f}",
        ),
        claim(
            "eq. 19", "r* of geometric lengths on this trace", f"{geometric:.2f}", f"{own:.2f}",
            abs(geometric / own - 1) <= 0.1, f"building {geometric:.2f} has {100 * rows[0]['throughput']:.1f} % of the"
            " throughput of the trace's own r*",
        ),
    ]  # fmt: skip
