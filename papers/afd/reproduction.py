"""The AFD paper: its ratios and figures 4 to 8 computed again, figure 3 on any trace, and the tables of both.

The paper takes D ~ Geo(p) from pictures of four traces (3.3), and nothing else about D enters eq. 19. Here p is fitted
to the lengths of a trace, the fit is tested, and r* is computed from the trace's own lengths as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from papers.common import Claim, Wording, claims_table, conclusion, curve, records, scenario
from reports.blocks import Document, Report, sections
from reports.svg import render
from scenarios.afd import check_scenario
from twin.afd.plan import BundlePlan, make_plan
from twin.sweeps.ratio_sweep import RatioSweep, prepare
from twin.theory.paper import PaperModel
from workloads.checks import FloatArray, IntArray
from workloads.pairs import JointEmpirical
from workloads.traces import read_trace

BASELINE = scenario("afd")
WORDING = Wording("afd")
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

    def model(self) -> PaperModel:
        """The paper's model of the configuration."""
        paper = _plan(batch_size=self.batch_size, requests_per_instance=self.requests).paper
        return replace(paper, mean_prefill=self.mean_prefill, mean_decode=self.mean_decode)


def _plan(**settings: Any) -> BundlePlan:
    return make_plan(check_scenario(BASELINE, settings, Path("afd-paper")), Path(), None)


def sweep() -> RatioSweep:
    """Figures 4 to 7 as one sweep: every configuration at every ratio."""
    return prepare(BASELINE, Path("afd-paper"), RATIOS, CONFIGURATIONS)


def compare_ratios() -> list[Document]:
    """Compare eq. 19 with every printed r*, and whether unrounded α and β of Table 4 would print it with the exact
    ones.
    """
    pairs = [(row, row.model()) for row in records(PrintedRatio, "afd", "optimal_ratio",
                                                   requests="requests_per_attention_instance")]  # fmt: skip
    agree = [pair for pair in pairs if round(pair[1].r_star, 2) == pair[0].r_star]
    compared = []
    for row, model in pairs:
        fields = asdict(row)
        prints = (row, model) in agree
        compared.append(
            {name: fields[name] for name in ("batch_size", "mean_prefill", "mean_decode")}
            | {
                "published": row.r_star,
                "computed": model.r_star,
                "prints_the_same": prints,
                "within_rounding": prints or rounding_allows([*agree, (row, model)]),
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


def document(sweep: Document) -> Document:
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


def claims(document: Document) -> list[Claim]:
    """The paper's claims on figures 4 to 7, beside the simulation's results."""
    base = _points(document, 0)
    first, last = base[1.0], base[32.0]
    gap = last["throughput_per_instance"] / last["throughput_per_instance_theory"] - 1
    gaps = {"straggling": last["gaps"]["barrier"] - 1, "flying": last["gaps"]["in_flight"] - 1}
    crossing = document["configurations"][0]["simulation"]["idle_crossing"]
    return [
        WORDING.claim("gap", gap < -0.12, gap=gap, last=last, **gaps),
        WORDING.claim("ffn-idle", first["idle_ffn"] > 0.6, **first),
        WORDING.claim("attention-idle", last["idle_attention"] > 0.6, idle=last["idle_attention"]),
        WORDING.claim("crossing", abs(crossing / 8 - 1) < 0.15, crossing=crossing),
        *map(_optimum, document["configurations"]),
        *_trends(document),
    ]


def annotate(document: Document) -> None:
    """Add stage times and steady-state idling to the baseline's points, for the claims."""
    plan = _plan()
    alpha, beta = plan.latency.attention
    for ratio, point in _points(document, 0).items():
        instances = point["attention_instances"]
        levels = (np.arange(2000) + 0.5) / 2000
        point["t_ffn"] = plan.paper.t_ffn(ratio)
        point["t_slowest"] = alpha * float(plan.cycle.phases[0].largest_of(instances, levels).mean()) + beta
        point["idle_ffn_steady"] = 1 - point["t_ffn"] / plan.cycle.step_time(ratio, instances)


def _optimum(configuration: Document) -> Claim:
    """The claims of figures 6 and 7 on the simulation-optimal ratio: within 10 % of r*, and the loss at r* if not."""
    theory, simulation, lines = configuration["theory"], configuration["simulation"], configuration["curves"]
    star, (low, high) = theory["r_star"], simulation["best_range"]
    at_star = float(np.interp(star, lines["ratio"], lines["barrier"]))
    return WORDING.claim(
        "optimum", low <= star * (1 + WITHIN) and high >= star * (1 - WITHIN), **simulation,
        name=_name(configuration), star=star, barrier=theory["r_star_barrier"],
        loss=-100 * (at_star / theory["throughput_at_r_star_barrier"] - 1),
    )  # fmt: skip


def _trends(document: Document) -> list[Claim]:
    """Figures 6 and 7: larger batches peak higher and farther right, longer contexts lower and farther right."""
    peaks = [
        max(point["throughput_per_instance"] for point in document["points"] if point["configuration"] == index)
        for index in range(len(CONFIGURATIONS))
    ]
    base, small, large, short, long = peaks
    stars = [configuration["theory"]["r_star"] for configuration in document["configurations"]]
    rows = [
        ("batches", [small, base, large], small < base < large),
        ("contexts", [short, base, long], short > base > long),
        ("stars", [stars[3], stars[0], stars[4]], stars[3] < stars[0] < stars[4]),
    ]
    return [WORDING.claim(key, agrees, **dict(zip("abc", values, strict=True))) for key, values, agrees in rows]


def _points(document: Document, configuration: int) -> dict[float, Document]:
    return {point["ratio"]: point for point in document["points"] if point["configuration"] == configuration}


def _name(configuration: Document) -> str:
    settings = {"batch_size": "B", "workload.decode.mean": "μ_D", "workload.prefill.mean": "μ_P"}
    changed = [f"{settings[key]} = {value:g}" for key, value in configuration["settings"].items()]
    return ", ".join(changed) or "baseline"


# -- of a trace --------------------------------------------------------------------------------------------------------


LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
CLOSELY = 0.05
"""Distance between two distribution functions up to which one "closely follows" the other; the paper names none."""
DRAWS = 199
SEED = 1


def reproduce(trace: Path) -> Document:
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


def geometric_fit(decode: IntArray) -> Document:
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
    quantiles = zip(LEVELS, np.quantile(decode, levels, method="inverted_cdf"), _quantile(levels, p), strict=True)
    lengths = np.unique(np.geomspace(1, decode.max(), 60).astype(np.int64)).tolist()
    return {
        "mean": 1 / p,
        "p": p,
        "cv": float(decode.std() / decode.mean()),
        "cv_geometric": float(np.sqrt(1 - p)),
        "distance": distance,
        "p_value": (farther + 1) / (DRAWS + 1),
        "quantiles": [
            {"level": level, "trace": float(own), "geometric": float(fitted)} for level, own, fitted in quantiles
        ],
        "survival": [
            {"length": length, "trace": float((decode >= length).mean()), "geometric": (1 - p) ** (length - 1)}
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


def ratios(pairs: JointEmpirical) -> list[Document]:
    """r* of eq. 19 (latencies and B of section 5.3) for three assumptions on lengths; eq. 6 at the trace's own load."""
    model = PaperModel(_plan().latency, BASELINE["batch_size"], pairs.mean_prefill, pairs.mean_decode)
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
    latency, lines = _plan().latency, {}
    for name, end in {"attention": 200_000, "ffn": 4_000, "communication": 4_000}.items():
        alpha, beta = getattr(latency, name)
        lines[name] = [[0.0, beta], [float(end), alpha * end + beta]]
    return lines


def length_claims(document: Document) -> list[Claim]:
    """Figure 3's claim on this trace, and what r* owes to it."""
    fit, first, last = document["lengths"], document["ratios"][0], document["ratios"][-1]
    geometric, own = first["r_star"], last["r_star"]
    share = first["throughput"]
    return [
        WORDING.claim("lengths", fit["distance"] <= CLOSELY, closely=CLOSELY, **fit),
        WORDING.claim("trace", abs(geometric / own - 1) <= 0.1, geometric=geometric, own=own, throughput=share),
    ]


# -- the report --------------------------------------------------------------------------------------------------------


def tables(document: Document) -> Report:
    """The optimal ratios, then the claims of figures 4 to 7, then the disagreements in words. Of a trace, figure 3."""
    if "lengths" in document:
        return sections(
            [
                WORDING.section("lengths", document["lengths"]["quantiles"], **document),
                WORDING.section("trace", document["ratios"]),
                ("Claims", claims_table(document["claims"])),
                *conclusion(document),
            ]
        )
    ratio_claims = map(_ratio_claim, document["optimal_ratios"])
    return sections(
        [
            WORDING.section("ratios", document["optimal_ratios"]),
            ("Figures 4 to 7, simulated", claims_table(document["claims"])),
            *conclusion({"claims": [*document["claims"], *ratio_claims]}),
        ]
    )


def _ratio_claim(row: Document) -> Claim:
    explained, unexplained = "unrounded parameters could explain it", "no rounding of Table 4 explains it"
    explanation = explained if row["within_rounding"] else unexplained
    values = row | {"printed": row["published"], "explanation": explanation}
    return WORDING.claim("ratio", row["prints_the_same"], **values)


def figures(document: Document) -> dict[str, str]:
    return {"lengths": render(_draw_lengths, document, 2), "latencies": render(_draw_latencies, document, 2)}


def _draw_lengths(panels: list[Any], document: Document) -> None:
    """P(D ≥ length), a straight line if D is geometric, and its quantiles over those of the fit."""
    fit = document["lengths"]
    survival, quantiles = panels
    curve(survival, fit["survival"], "length", "trace", "o", ms=3, label="trace")
    curve(survival, fit["survival"], "length", "geometric", "-", lw=1.2, label="geometric")
    survival.set(yscale="log", xlabel="tokens of an answer", ylabel="share of answers of at least that length")
    survival.set_ylim(bottom=0.5 / document["requests"])
    survival.legend()
    curve(quantiles, fit["quantiles"], "geometric", "trace", "o", ms=4)
    largest = max(row["geometric"] for row in fit["quantiles"])
    quantiles.plot([0, largest], [0, largest], "-", color="grey", lw=0.8)
    quantiles.set(xlabel="quantile of the geometric fit, tokens", ylabel="quantile of the trace, tokens")


def _draw_latencies(panels: list[Any], document: Document) -> None:
    names = (("attention",), ("ffn", "communication"))
    for panel, lines, label in zip(panels, names, ("token load T", "requests B"), strict=True):
        for name in lines:
            panel.plot(*zip(*document["latencies"][name], strict=True), lw=1.4, label=name)
        panel.set(xlabel=label, ylabel="cycles", xlim=(0, None), ylim=(0, None))
        panel.legend()
