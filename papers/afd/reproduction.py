"""The AFD paper: its ratios and figures 4 to 8 computed again, figure 3 on any trace, and the tables of both.

The paper takes D ~ Geo(p) from pictures of four traces (3.3), and nothing else about D enters eq. 19. Here p is fitted
to the lengths of a trace, the fit is tested, and r* is computed from the trace's own lengths as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from papers.common import claim, claims_table, disagreements, records, scenario
from reports.blocks import Document, Report, Table, rows_table, sections
from reports.svg import render
from scenarios.afd import check_scenario
from twin.afd.plan import make_plan
from twin.sweeps.ratio_sweep import RatioSweep, prepare
from twin.theory.paper import PaperModel
from workloads.checks import FloatArray, IntArray
from workloads.pairs import JointEmpirical
from workloads.traces import read_trace

BASELINE = scenario("afd")
CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 128},
    {"batch_size": 512},
    {"workload.decode.mean": 100.0},
    {"workload.prefill.mean": 500.0},
]
RATIOS = "1,3/2,2,5/2,3,4:20,24,32"
WITHIN = 0.10
"""The distance between theory and simulation-optimal ratio that the paper states."""


@dataclass(frozen=True)
class PrintedRatio:
    """One r* that the paper prints, with its configuration."""

    batch_size: int
    mean_prefill: float
    mean_decode: float
    requests: int
    r_star: float
    note: str


def printed_ratios() -> list[PrintedRatio]:
    """Every r* in the paper's text and figures."""
    return records(PrintedRatio, "afd", "optimal_ratio", requests="requests_per_attention_instance")


def sweep() -> RatioSweep:
    """Figures 4 to 7 as one sweep: every configuration at every ratio."""
    return prepare(BASELINE, Path("afd-paper"), RATIOS, CONFIGURATIONS)


def compare_ratios() -> list[dict[str, Any]]:
    """Compare eq. 19 with every printed r*, and whether unrounded α and β of Table 4 would print it with the exact
    ones.
    """
    rows = printed_ratios()
    models = [_model(row) for row in rows]
    agree = [index for index, row in enumerate(rows) if round(models[index].r_star, 2) == row.r_star]
    compared = []
    for index, (row, model) in enumerate(zip(rows, models, strict=True)):
        together = [(rows[i], models[i]) for i in {*agree, index}]
        compared.append(
            {
                "batch_size": row.batch_size,
                "mean_prefill": row.mean_prefill,
                "mean_decode": row.mean_decode,
                "published": row.r_star,
                "computed": model.r_star,
                "prints_the_same": index in agree,
                "within_rounding": index in agree or rounding_allows(together),
                "note": row.note,
            }
        )
    return compared


def rounding_allows(values: Sequence[tuple[PrintedRatio, PaperModel]]) -> bool:
    """True if some α and β that round to Table 4 give every printed r* to its two digits.

    |r_A - r| ≤ ½ digit is linear in the four once multiplied by α_F B, as is r_peak² B α_F = β_F: a linear programme.
    """
    from scipy.optimize import linprog

    half = 0.005
    rows: list[list[float]] = []
    for published, model in values:
        low, high, batch = published.r_star - half, published.r_star + half, published.batch_size
        if model.regime == "ffn-bottleneck":
            rows += [[0, 0, -(high**2) * batch, 1], [0, 0, low**2 * batch, -1]]
        else:
            load = model.mean_load
            rows += [[load, 1, -high * batch, -1], [-load, -1, low * batch, 1]]
    # alpha_A, beta_A, alpha_F, beta_F and half a unit of their last printed digit
    printed_digits = [(0.00165, 5e-6), (50, 0.5), (0.083, 5e-4), (100, 0.5)]
    scale = np.array([value for value, _ in printed_digits])
    bounds = [((value - digit) / value, (value + digit) / value) for value, digit in printed_digits]
    solution = linprog(np.zeros(4), A_ub=np.array(rows) * scale, b_ub=np.zeros(len(rows)), bounds=bounds)
    return bool(solution.success)


def document(sweep: dict[str, Any]) -> dict[str, Any]:
    annotate(sweep)
    return {
        "schema": "twin.reproduction/1",
        "paper": "afd",
        "simulated": True,
        "optimal_ratios": compare_ratios(),
        "claims": claims(sweep),
        "run": sweep["run"],
        "sweep": sweep,
    }


def claims(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The paper's claims on figures 4 to 7, beside the simulation's results."""
    base = _points(document, 0)
    first, last = base[1.0], base[32.0]
    gap = last["throughput_per_instance"] / last["throughput_per_instance_theory"] - 1
    straggling = last["gaps"]["barrier"] - 1
    crossing = document["configurations"][0]["simulation"]["idle_crossing"]
    rows = [
        claim(
            "figure 4", "simulated eq. 21 over theory at r = 32", "about -15 %", f"{100 * gap:+.1f} %", gap < -0.12,
            f"of this, waiting for the slowest instance is {100 * straggling:+.2f} %: the FFN takes"
            f" {last['t_ffn']:.0f} cycles, the slowest attention instance about {last['t_slowest']:.0f}, so it hides;"
            f" uncounted tokens in flight are {100 * (last['gaps']['in_flight'] - 1):+.1f} %",
        ),
        claim("figure 5", "FFN idle at r = 1", "> 60 %", f"{100 * first['idle_ffn']:.1f} %", first["idle_ffn"] > 0.6,
               f"the start is quicker than the steady state, where it is {100 * first['idle_ffn_steady']:.1f} %"),
        claim("figure 5", "attention idle at r = 32", "> 60 %", f"{100 * last['idle_attention']:.1f} %",
               last["idle_attention"] > 0.6, ""),
        claim("figure 5", "idle ratios cross at r", "about 8", f"{crossing:.1f}", abs(crossing / 8 - 1) < 0.15, ""),
    ]  # fmt: skip
    return rows + _optima(document) + _trends(document)


def annotate(document: dict[str, Any]) -> None:
    """Add stage times and steady-state idling to the baseline's points, for the claims."""
    plan = make_plan(check_scenario(BASELINE, {}, Path("afd-paper")), Path(), None)
    alpha, beta = plan.latency.attention
    for ratio, point in _points(document, 0).items():
        instances = point["attention_instances"]
        levels = (np.arange(2000) + 0.5) / 2000
        point["t_ffn"] = plan.paper.t_ffn(ratio)
        point["t_slowest"] = alpha * float(plan.cycle.phases[0].largest_of(instances, levels).mean()) + beta
        point["idle_ffn_steady"] = 1 - point["t_ffn"] / plan.cycle.step_time(ratio, instances)


def _optima(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The claims of figures 6 and 7 on the simulation-optimal ratio: within 10 % of r*, and the loss at r* if not."""
    rows = []
    for configuration in document["configurations"]:
        theory, simulation = configuration["theory"], configuration["simulation"]
        star, best, barrier = theory["r_star"], simulation["best_ratio"], theory["r_star_barrier"]
        low, high = simulation["best_range"]
        reaches = low <= star * (1 + WITHIN) and high >= star * (1 - WITHIN)
        curve = configuration["curves"]
        at_star = float(np.interp(star, curve["ratio"], curve["barrier"]))
        loss = at_star / theory["throughput_at_r_star_barrier"] - 1
        rows.append(
            claim(
                "figures 6, 7",
                f"simulation-optimal r, {_name(configuration)}",
                f"{star:.2f} ± 10 %",
                f"{best:g} ({low:g} to {high:g} alike)",
                reaches,
                f"barrier- and pipeline-aware optimum {barrier:.2f}; building r* = {star:.2f} instead costs"
                f" {-100 * loss:.1f} % of throughput",
            )
        )
    return rows


def _trends(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures 6 and 7: larger batches peak higher and farther right, longer contexts lower and farther right."""
    peaks = [
        max(point["throughput_per_instance"] for point in document["points"] if point["configuration"] == index)
        for index in range(len(CONFIGURATIONS))
    ]
    base, small, large, short, long = peaks
    stars = [configuration["theory"]["r_star"] for configuration in document["configurations"]]
    return [
        claim("figure 6", "peak throughput grows with B = 128, 256, 512", "grows",
               f"{small:.3f}, {base:.3f}, {large:.3f}", small < base < large, ""),
        claim("figure 7", "peak throughput falls with the mean context 200, 600, 1000", "falls",
               f"{short:.3f}, {base:.3f}, {long:.3f}", short > base > long, ""),
        claim("figure 7", "r* grows with the mean context 200, 600, 1000", "2.17, 9.30, 17.25",
               f"{stars[3]:.2f}, {stars[0]:.2f}, {stars[4]:.2f}", stars[3] < stars[0] < stars[4], ""),
    ]  # fmt: skip


def _points(document: dict[str, Any], configuration: int) -> dict[float, dict[str, Any]]:
    return {point["ratio"]: point for point in document["points"] if point["configuration"] == configuration}


def _name(configuration: dict[str, Any]) -> str:
    settings = {"batch_size": "B", "workload.decode.mean": "μ_D", "workload.prefill.mean": "μ_P"}
    changed = [f"{settings[key]} = {value:g}" for key, value in configuration["settings"].items()]
    return ", ".join(changed) or "baseline"


def _model(row: PrintedRatio) -> PaperModel:
    document = {**BASELINE, "batch_size": row.batch_size, "requests_per_instance": row.requests}
    settings = {"workload.prefill.mean": row.mean_prefill, "workload.decode.mean": row.mean_decode}
    return make_plan(check_scenario(document, settings, Path("afd-paper")), Path(), None).paper


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
    return document | {"claims": length_claims(document)}


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


def length_claims(document: dict[str, Any]) -> list[dict[str, Any]]:
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


def tables(document: Document) -> Report:
    """The optimal ratios, then the claims of figures 4 to 7, then the disagreements in words. Of a trace, figure 3."""
    if "lengths" in document:
        return _of_trace(document)
    claims = [*document["claims"], *map(_ratio_claim, document["optimal_ratios"])]
    return sections(
        [
            ("Optimal ratios, eq. 19", _ratios(document["optimal_ratios"])),
            ("Figures 4 to 7, simulated", claims_table(document["claims"])),
            ("What disagrees", disagreements(claims)),
        ]
    )


def _ratio_claim(row: Document) -> Document:
    explained, unexplained = "unrounded parameters could explain it", "no rounding of Table 4 explains it"
    return claim(
        "eq. 19", f"r* at B = {row['batch_size']}", f"{row['published']:.2f}", f"{row['computed']:.4f}",
        row["prints_the_same"], explained if row["within_rounding"] else unexplained,
    )  # fmt: skip


def _ratios(rows: list[Document]) -> Table:
    return rows_table(
        "B | μ_P | μ_D | printed | computed | same digits",
        "{batch_size} | {mean_prefill:g} | {mean_decode:g} | {published:.2f} | {computed:.4f} | {prints_the_same:yes}",
        rows,
    )


def _of_trace(document: Document) -> Report:
    fit = document["lengths"]
    return sections(
        [
            (
                f"Figure 3: {document['requests']:,} answers of {document['trace']}, mean {fit['mean']:.1f} tokens",
                rows_table(
                    "quantile | trace | geometric", "{level:g} | {trace:.0f} | {geometric:.0f}", fit["quantiles"]
                ),
            ),
            (
                "r* with the latencies and B of section 5.3",
                rows_table(
                    "lengths | tokens of a slot | r* | throughput if built",
                    "{assumption} | {slot_load:.0f} | {r_star:.2f} | {throughput:100 .1f} %",
                    document["ratios"],
                ),
            ),
            ("Claims", claims_table(document["claims"])),
            ("What disagrees", disagreements(document["claims"])),
        ]
    )


def figures(document: Document) -> dict[str, str]:
    return {"lengths": render(_draw_lengths, document, 2), "latencies": render(_draw_latencies, document, 2)}


def _draw_lengths(panels: list[Any], document: Document) -> None:
    """P(D ≥ length), a straight line if D is geometric, and its quantiles over those of the fit."""
    fit = document["lengths"]
    survival, quantiles = panels
    lengths = [row["length"] for row in fit["survival"]]
    survival.semilogy(lengths, [row["trace"] for row in fit["survival"]], "o", ms=3, label="trace")
    survival.semilogy(lengths, [row["geometric"] for row in fit["survival"]], "-", lw=1.2, label="geometric")
    survival.set(xlabel="tokens of an answer", ylabel="share of answers of at least that length")
    survival.set_ylim(bottom=0.5 / document["requests"])
    survival.legend()
    levels = [row["geometric"] for row in fit["quantiles"]]
    quantiles.plot(levels, [row["trace"] for row in fit["quantiles"]], "o", ms=4)
    quantiles.plot([0, max(levels)], [0, max(levels)], "-", color="grey", lw=0.8)
    quantiles.set(xlabel="quantile of the geometric fit, tokens", ylabel="quantile of the trace, tokens")


def _draw_latencies(panels: list[Any], document: Document) -> None:
    for panel, names, label in zip(
        panels, (["attention"], ["ffn", "communication"]), ("token load T", "requests B"), strict=True
    ):
        for name in names:
            panel.plot(*zip(*document["latencies"][name], strict=True), lw=1.4, label=name)
        panel.set(xlabel=label, ylabel="cycles", xlim=(0, None), ylim=(0, None))
        panel.legend()
