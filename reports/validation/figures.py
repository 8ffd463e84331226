"""Figures of `twin validate`, drawn from its document."""

from __future__ import annotations

from functools import partial
from typing import Any

from reports.layout import render
from reports.validation.table import arriving, clock_of

Document = dict[str, Any]

PREDICTED, MEASURED = "#1f5fa8", "#d1762b"
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
LINES = {"live": ("measured", "-", MEASURED), "twin": ("forecast", "--", PREDICTED)}
"""Label, line style and colour of each side."""


def validation_figures(document: Document) -> dict[str, str]:
    """Latency distributions of each load, and requests in the system over time, measured and forecast."""
    loads, clock, noun = document["loads"], clock_of(document), arriving(document)
    figures = {f"latencies-{load['load']:g}": render(partial(_latencies, clock, noun), load, 4) for load in loads}
    figures["over-time"] = render(_over_time, document, len(loads))
    return figures


def _latencies(clock: str, noun: str, axes: list[Any], load: Document) -> None:
    for panel, (name, label) in zip(axes, LABELS.items(), strict=True):
        for side, (text, style, colour) in LINES.items():
            curve = load["curves"][side].get(name)
            if curve:
                shares = [i / (len(curve) - 1) for i in range(len(curve))]
                panel.plot([1e3 * value for value in curve], shares, style, color=colour, linewidth=1.6, label=text)
        panel.set_xscale("log")
        panel.set_xlabel(f"{label}, ms")
    axes[0].set_ylabel("share")
    axes[0].legend(fontsize=8, frameon=False)
    axes[0].set_title(f"load {load['load']:g}: {load['rate']:.1f} {noun}/s; clock: {clock}", loc="left", fontsize=10)


def _over_time(axes: list[Any], document: Document) -> None:
    for panel, load in zip(axes, document["loads"], strict=True):
        line = load["timeline"]
        for side, (text, style, colour) in LINES.items():
            panel.step(line["time"], line[side], style, color=colour, linewidth=1.4, label=text)
        panel.set_title(f"load {load['load']:g}; clock: {clock_of(document)}", loc="left", fontsize=10)
        panel.set_xlabel("seconds")
    axes[0].set_ylabel("requests in the system")
    axes[0].legend(fontsize=8, frameon=False)
