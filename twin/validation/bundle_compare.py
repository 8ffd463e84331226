"""Errors of predicted bundles, ratio by ratio, and what choosing a predicted ratio costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reports.bundle_metrics import BundleMetrics
from twin.validation.compare import error_entry

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
