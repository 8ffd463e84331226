"""`twin validate` of a bundle, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from reports.layout import bullets, percent, sections, table
from reports.validation.verdict import contention_line, verdict_line

Document = dict[str, Any]

SHOWN = {
    "throughput": ("throughput, tokens/s per instance", 1.0, 1),
    "tpot": ("TPOT, ms", 1e3, 2),
    "idle_attention": ("attention idle, %", 100.0, 1),
    "idle_ffn": ("FFN idle, %", 100.0, 1),
    "transfer_attention_to_ffn": ("a message to the FFN, µs", 1e6, 1),
    "transfer_ffn_to_attention": ("a message back, µs", 1e6, 1),
}
"""Metrics with their labels, factors of their units, and digits."""

SIDES = {"measured": "live", "predicted": "twin", "barrier": "theory with barrier", "published": "theory as published"}


def bundle_table(document: Document) -> Group:
    """Measured beside predicted at each ratio, the best ratio of each side, and the goals that were missed."""
    titled: list[tuple[str, Any]] = [("How it was measured", Text("\n".join(headline(document))))]
    titled += [(label, _metric(document, name)) for name, (label, _, _) in SHOWN.items()]
    titled.append(("Best ratio", _best(document)))
    missed = document["missed"]
    titled.append(("Goals that the prediction misses", bullets(missed) if missed else Text("none")))
    titled.append(("", Text(verdict_line(document))))
    return sections(titled)


def headline(document: Document) -> list[str]:
    """The device, the model, and what the errors mean."""
    backend, scenario = document["backend"], document["scenario"]
    system = scenario["system"]
    return [
        f"{document['name']}: {scenario['model']['path']} ({backend['dtype']}) on {backend['device']}",
        f"B = {system['batch_size']}, {system['microbatches']} microbatches, {scenario['requests']} requests a"
        f" repeat, {scenario['repeats']} repeats",
        f"clock: {document['clock']} (CPU time of each role's own computation). {document['note']}",
        *contention_line(document),
    ]


def _metric(document: Document, name: str) -> Any:
    _, factor, digits = SHOWN[name]
    share = factor == 100.0
    shown = table("", "measured", "repeat spread", "predicted", "error", "95 % interval", "goal")
    for entry in document["ratios"]:
        metric = entry["metrics"].get(name)
        if metric is None:
            continue
        low, high = (_error(each, share) for each in metric["interval"])
        shown.add_row(
            entry["topology"],
            f"{factor * metric['measured']:.{digits}f}",
            f"{factor * metric['repeat_spread']:.{digits}f}",
            f"{factor * metric['predicted']:.{digits}f}",
            _error(metric["error"], share),
            f"{low} … {high}",
            "" if metric["goal"] is None else f"{100 * metric['goal']:g} {'points' if share else '%'}",
        )
    return shown


def _error(error: float, share: bool) -> str:
    return f"{100 * error:+.1f} points" if share else percent(error)


def _best(document: Document) -> Any:
    shown = table("", "r*", "continuous r*", "measured throughput lost")
    for side, label in SIDES.items():
        theory = document["theory"].get(side)
        shown.add_row(
            label,
            str(document["best_ratio"][side]),
            f"{theory['r_star']:.2f}" if theory else "",
            f"{100 * document['regrets'][side]:.1f} %",
        )
    return shown
