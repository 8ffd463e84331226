"""Errors of predicted bundles, ratio by ratio, and what choosing a predicted ratio costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from latency_models.stages import PassLatency
from reports.bundle_metrics import BundleMetrics
from scenarios.validation import BundleValidationScenario
from twin.afd.role_bundle import TOKEN_BYTES, RoleBundleConfig
from twin.afd.role_times import RoleTimes
from twin.theory.cycle import CycleModel
from twin.theory.load import load_phases
from twin.theory.paper import PaperModel
from twin.validation.compare import error_entry
from workloads.pairs import LengthPairs

SEARCHED = 0.25, 64.0


def step_lines(times: RoleTimes, config: RoleBundleConfig, lengths: LengthPairs, largest: int) -> PassLatency:
    """Lines of a whole decode step; the coordinator's work is counted at `largest` attention instances."""
    batch, layers, link, mean = config.batch_size, config.layers, config.link, times.mean
    entering = batch / lengths.mean_decode
    stage = mean("attention.stage", (batch, 0))
    per_token = mean("attention.stage", (batch, padding(lengths, batch))) - stage
    edges = mean("attention.begin", (batch, 0, entering)) - stage + mean("attention.end", (batch, entering))
    command = mean("coordinator.collect", (batch,))
    command += mean("coordinator.decide", (batch * largest, entering * largest, entering * largest))
    command += (largest - 1) / 2 * (mean("coordinator.receive", (batch,)) + mean("coordinator.send", (entering,)))
    command += link.seconds(TOKEN_BYTES * batch) + link.seconds(0)
    attention = layers * (stage + mean("attention.wait", ())) + edges + command
    per_row = mean("ffn.stage", (1,)) - mean("ffn.stage", (0,))
    per_instance = mean("ffn.receive", (batch,)) + mean("ffn.send", (batch,))
    constant = max(mean("ffn.stage", (0,)) + mean("ffn.wait", ()) - per_instance, 0.0)
    row_seconds = config.sizes.row / link.bandwidth
    return PassLatency(
        attention=(layers * per_token, attention),
        ffn=(layers * (per_row + per_instance / batch), layers * constant),
        communication=(2 * layers * row_seconds, 2 * layers * link.latency),
    )


def padding(lengths: LengthPairs, batch_size: int) -> float:
    """The mean of the largest of B slots' loads over the mean load: attention on a CPU pads requests to the longest."""
    pmf = lengths.slot_load_pmf()
    largest = np.cumsum(pmf) ** batch_size
    return float((len(pmf) - 1 - largest[:-1].sum()) / lengths.renewal_load())


def theory_curves(
    times: RoleTimes, scenario: BundleValidationScenario, config: RoleBundleConfig, ratios: Sequence[int]
) -> dict[str, Any]:
    """Throughput per instance of both theories at each ratio, and their best ratios."""
    lengths, batch = scenario.workload.lengths(None), config.batch_size
    latency = step_lines(times, config, lengths, max(ratios))
    paper = PaperModel(latency, batch, lengths.mean_prefill, lengths.mean_decode)
    cycle = CycleModel(latency, batch, config.microbatches, load_phases(lengths, batch, in_step=False), "independent")
    return {
        "lines": {
            "attention": list(latency.attention),
            "ffn": list(latency.ffn),
            "communication": list(latency.communication),
        },
        "published": {"throughput": [paper.throughput(x) for x in ratios], "r_star": paper.r_star},
        "barrier": {"throughput": [cycle.throughput(x) for x in ratios], "r_star": cycle.best_ratio(*SEARCHED)},
    }


GOALS = {"throughput": 0.03, "tpot": 0.03, "idle_attention": 0.02, "idle_ffn": 0.02}
"""Limits of each ratio's |error|, averaged over repeats; `--tolerance` multiplies them."""

MEAN_GOALS = {"throughput": 0.015, "tpot": 0.015}
"""Limits of the mean |error| over all ratios."""

REGRET_GOAL = 0.01
"""Limit of the measured throughput that choosing the predicted ratio loses."""

DIFFERENCES = ("idle_attention", "idle_ffn")
"""Metrics that are shares: their errors are differences, not relative ones."""


def compare_ratios(
    measured: Mapping[int, Sequence[BundleMetrics]],
    predicted: Mapping[int, Sequence[BundleMetrics]],
    theory: Mapping[str, Any],
) -> dict[str, Any]:
    """Metrics and errors of each ratio, repeat by repeat, since both have the same requests, and the best ratios'
    regret.
    """
    ratios = list(measured)
    entries: list[dict[str, Any]] = [
        {
            "ratio": x,
            "topology": f"{x}A-1F",
            "requests": measured[x][0].requests,
            "metrics": _metrics([_values(run) for run in measured[x]], [_values(run) for run in predicted[x]]),
            "theory": {name: theory[name]["throughput"][i] for name in ("published", "barrier")},
        }
        for i, x in enumerate(ratios)
    ]
    curves = {
        side: {x: entry["metrics"]["throughput"][side] for x, entry in zip(ratios, entries, strict=True)}
        for side in ("measured", "predicted")
    } | {name: dict(zip(ratios, theory[name]["throughput"], strict=True)) for name in ("published", "barrier")}
    best = {name: max(curve, key=curve.__getitem__) for name, curve in curves.items()}
    highest = max(curves["measured"].values())
    regrets = {name: 1 - curves["measured"][x] / highest for name, x in best.items()}
    return {
        "ratios": entries,
        "errors": {
            name: {str(entry["ratio"]): entry["metrics"][name]["error"] for entry in entries}
            for name in entries[0]["metrics"]
        },
        "mean_absolute_errors": {
            name: float(np.mean([abs(entry["metrics"][name]["error"]) for entry in entries]))
            for name in entries[0]["metrics"]
        },
        "best_ratio": best,
        "regret": regrets["predicted"],
        "regrets": regrets,
        "theory": dict(theory),
    }


def _values(run: BundleMetrics) -> dict[str, float | None]:
    """The metrics by name. Throughput counts all tokens, since slots are full; transfers are means."""
    to_ffn, to_attention = run.attention_to_ffn, run.ffn_to_attention
    return {
        "throughput": run.throughput_full,
        "throughput_eq_21": run.throughput,
        "tpot": run.tpot_gaps,
        "tpot_eq_22": run.tpot,
        "idle_attention": run.idle_attention,
        "idle_ffn": run.idle_ffn,
        "transfer_attention_to_ffn": to_ffn.seconds / to_ffn.messages,
        "transfer_ffn_to_attention": to_attention.seconds / to_attention.messages,
    }


def _metrics(
    measured: Sequence[Mapping[str, float | None]], predicted: Sequence[Mapping[str, float | None]]
) -> dict[str, Any]:
    """Mean, error and goal of each metric over the repeats."""
    entries = {}
    for name in measured[0]:
        if any(run[name] is None for run in (*measured, *predicted)):
            continue
        live, twin = (np.array([run[name] for run in runs], dtype=np.float64) for runs in (measured, predicted))
        # Transfers over a link that takes no time.
        relative = np.divide(twin, live, out=np.ones_like(live), where=live != 0) - 1
        errors = twin - live if name in DIFFERENCES else relative
        entries[name] = error_entry(live, twin, errors, float(live.std(ddof=1)), GOALS.get(name))
    return entries


def missed_goals(document: Mapping[str, Any], tolerance: float) -> list[str]:
    """One line for each goal, times `tolerance`, that the prediction misses."""
    lines = [
        f"{entry['topology']}: {name} is off by {100 * metric['error']:+.1f} {_unit(name)},"
        f" goal {100 * metric['goal'] * tolerance:g} {_unit(name)}"
        for entry in document["ratios"]
        for name, metric in entry["metrics"].items()
        if metric["goal"] is not None and abs(metric["error"]) > metric["goal"] * tolerance
    ]
    for name, goal in MEAN_GOALS.items():
        if (error := document["mean_absolute_errors"][name]) > goal * tolerance:
            lines.append(
                f"all ratios: {name} is off by {100 * error:.1f} % on average, goal {100 * goal * tolerance:g} %"
            )
    if document["regret"] > REGRET_GOAL * tolerance:
        lines.append(
            f"choosing {document['best_ratio']['predicted']}A-1F loses {100 * document['regret']:.1f} % of the measured"
            f" throughput, goal {100 * REGRET_GOAL * tolerance:g} %"
        )
    return lines


def _unit(name: str) -> str:
    return "points" if name in DIFFERENCES else "%"
