"""The report of `twin validate` of a bundle."""

from __future__ import annotations

from reports.blocks import Block, Chart, Curve, Document, Figure, Report, Table, Text
from reports.layout import percent, table, timeline
from reports.pages.theme import MEASURED, PREDICTED, SOFT, WAITING
from reports.validation.engine import SIDES, contention_line, verdict_blocks

METRICS = {
    "throughput": ("throughput, tokens/s per instance", 1.0, 1),
    "tpot": ("TPOT, ms", 1e3, 2),
    "idle_attention": ("attention idle, %", 100.0, 1),
    "idle_ffn": ("FFN idle, %", 100.0, 1),
    "transfer_attention_to_ffn": ("a message to the FFN, µs", 1e6, 1),
    "transfer_ffn_to_attention": ("a message back, µs", 1e6, 1),
}
"""Metrics with their labels, factors of their units, and digits."""

THEORIES = {"barrier": ("theory with barrier", WAITING), "published": ("theory as published", SOFT)}
RATIOS = {"measured": "live", "predicted": "twin", **{name: label for name, (label, _) in THEORIES.items()}}


def bundle_report(document: Document) -> Report:
    """Measured beside predicted at each ratio, the best ratio of each side, and the goals that were missed."""
    blocks: list[Block] = [Text("How it was measured", "heading"), Text("\n".join(headline(document)))]
    for name, (label, _, _) in METRICS.items():
        blocks += [Text(label, "heading"), _metric(document, name)]
    blocks += [Text("Best ratio", "heading"), _best(document), *bundle_figures(document)]
    blocks += verdict_blocks(document, "prediction")
    return Report(f"{document['name']}: predicted and measured", blocks)


def bundle_figures(document: Document) -> list[Block]:
    """Throughput, TPOT and idle shares over the ratio, and tokens over time at the measured optimum."""
    entries = document["ratios"]
    ratios = [entry["ratio"] for entry in entries]
    theories = [
        Curve(label, ratios, [entry["theory"][name] for entry in entries], colour, "dashed")
        for name, (label, colour) in THEORIES.items()
    ]
    panels = [("Throughput", "throughput", 1.0, "tokens/s per instance")]
    if all("tpot" in entry["metrics"] for entry in entries):
        panels.append(("TPOT", "tpot", 1e3, "TPOT, ms"))
    panels += [(f"Idle share, {label}", f"idle_{role}", 100.0, "idle time, %")
               for role, label in (("attention", "attention"), ("ffn", "FFN"))]  # fmt: skip
    charts = []
    for title, name, factor, unit in panels:
        curves = [
            Curve(label, ratios, [factor * entry["metrics"][name][side] for entry in entries], colour, "both")
            for side, label, colour in (("measured", "live", MEASURED), ("predicted", "twin", PREDICTED))
        ]
        curves += theories if name == "throughput" else []
        charts.append(Chart(title, curves, "attention instances per FFN instance, r", unit))
    best = document["best_ratio"]["measured"]
    line = document["timelines"][str(best)]
    curves = [Curve(label, line["time"], line[side], colour, style) for side, (label, colour, style) in SIDES.items()]
    clock = f"{document['name']}; clock: {document['clock']}"
    over_time = timeline(f"Tokens over time, {best}A-1F", curves, "tokens")
    return [
        Figure("ratios", charts, clock, columns=2, size=(9.0, 6.4)),
        Figure("over-time", [over_time], clock, size=(7.2, 4.2)),
    ]


def headline(document: Document) -> list[str]:
    backend, scenario = document["backend"], document["scenario"]
    system = scenario["system"]
    return [
        f"{document['name']}: {scenario['model']['path']} ({backend['dtype']}) on {backend['device']}",
        f"B = {system['batch_size']}, {system['microbatches']} microbatches, {scenario['requests']} requests a"
        f" repeat, {scenario['repeats']} repeats",
        f"clock: {document['clock']} (CPU time of each role's own computation). {document['note']}",
        *contention_line(document),
    ]


def _metric(document: Document, name: str) -> Table:
    _, factor, digits = METRICS[name]
    share = factor == 100.0
    rows = table("", "measured", "repeat spread", "predicted", "error", "95 % interval", "goal")
    for entry in document["ratios"]:
        metric = entry["metrics"].get(name)
        if metric is None:
            continue
        low, high = (_error(end, share) for end in metric["interval"])
        rows.add_row(
            entry["topology"],
            f"{factor * metric['measured']:.{digits}f}",
            f"{factor * metric['repeat_spread']:.{digits}f}",
            f"{factor * metric['predicted']:.{digits}f}",
            _error(metric["error"], share),
            f"{low} … {high}",
            "" if metric["goal"] is None else f"{100 * metric['goal']:g} {'points' if share else '%'}",
        )
    return rows


def _error(error: float, share: bool) -> str:
    return f"{100 * error:+.1f} points" if share else percent(error)


def _best(document: Document) -> Table:
    rows = table("", "r*", "continuous r*", "measured throughput lost")
    for side, label in RATIOS.items():
        theory = document["theory"].get(side)
        rows.add_row(
            label,
            str(document["best_ratio"][side]),
            f"{theory['r_star']:.2f}" if theory else "",
            f"{100 * document['regrets'][side]:.1f} %",
        )
    return rows
