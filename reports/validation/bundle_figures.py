"""Figures of `twin validate` of a bundle, drawn from its document."""

from __future__ import annotations

from typing import Any

from reports.layout import render

Document = dict[str, Any]

PREDICTED, MEASURED, BARRIER, PUBLISHED = "#1f5fa8", "#d1762b", "#4d9a5b", "#8a8a8a"
LINES = {"live": ("measured", "-", MEASURED), "twin": ("predicted", "--", PREDICTED)}


def bundle_figures(document: Document) -> dict[str, str]:
    """Throughput, TPOT and idle shares over the ratio, and tokens over time at the measured optimum."""
    return {"ratios": render(_ratios, document, 3), "over-time": render(_over_time, document, 1)}


def _ratios(axes: list[Any], document: Document) -> None:
    entries = document["ratios"]
    ratios = [entry["ratio"] for entry in entries]

    def column(name: str, side: str, factor: float = 1.0) -> list[float]:
        return [factor * entry["metrics"][name][side] for entry in entries]

    throughput, tpot, idle = axes
    for side, style, colour in (("measured", "o-", MEASURED), ("predicted", "x--", PREDICTED)):
        label = {"measured": "live", "predicted": "twin"}[side]
        throughput.plot(ratios, column("throughput", side), style, color=colour, linewidth=1.6, label=label)
        if all("tpot" in entry["metrics"] for entry in entries):
            tpot.plot(ratios, column("tpot", side, 1e3), style, color=colour, linewidth=1.6, label=label)
        idle.plot(ratios, column("idle_attention", side), style, color=colour, label=f"attention, {label}")
        idle.plot(ratios, column("idle_ffn", side), style, color=colour, alpha=0.5, label=f"FFN, {label}")
    for name, colour in (("barrier", BARRIER), ("published", PUBLISHED)):
        label = {"barrier": "theory with barrier", "published": "theory as published"}[name]
        throughput.plot(ratios, [entry["theory"][name] for entry in entries], ":", color=colour, label=label)
    throughput.set_ylabel("tokens/s per instance")
    throughput.set_title(f"{document['name']}; clock: {document['clock']}", loc="left", fontsize=10)
    tpot.set_ylabel("TPOT, ms")
    idle.set_ylabel("idle share")
    for panel in axes:
        panel.set_xlabel("attention instances per FFN instance, r")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=8, frameon=False)


def _over_time(axes: list[Any], document: Document) -> None:
    (panel,) = axes
    best = document["best_ratio"]["measured"]
    line = document["timelines"][str(best)]
    for side, (label, style, colour) in LINES.items():
        panel.plot(line["time"], line[side], style, color=colour, linewidth=1.4, label=label)
    panel.set_xlabel("seconds")
    panel.set_ylabel("tokens")
    panel.set_title(f"{best}A-1F; clock: {document['clock']}", loc="left", fontsize=10)
    panel.legend(fontsize=8, frameon=False)
