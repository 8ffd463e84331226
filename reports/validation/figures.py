"""Figures of `twin validate`, drawn from its document alone."""

from __future__ import annotations

from typing import Any

from reports.reproductions.layout import render

Document = dict[str, Any]

PREDICTED, MEASURED, PACE = "#1f5fa8", "#d1762b", "#8a8a8a"
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def validation_figures(document: Document) -> dict[str, str]:
    """Distributions of every load, predicted over measured; requests in the system, and the pace, over time."""
    loads = document["loads"]
    found = {f"latencies-{load['load']:g}": render(_latencies, load, 4) for load in loads}
    found["over-time"] = render(_over_time, document, len(loads))
    return found


def _latencies(axes: list[Any], load: Document) -> None:
    for panel, (name, label) in zip(axes, LABELS.items(), strict=True):
        for plant, colour in (("live", MEASURED), ("twin", PREDICTED)):
            curve = load["curves"][plant].get(name)
            if curve:
                shares = [i / (len(curve) - 1) for i in range(len(curve))]
                style = "-" if plant == "live" else "--"
                told = "measured" if plant == "live" else "predicted"
                panel.plot([1e3 * value for value in curve], shares, style, color=colour, linewidth=1.6, label=told)
        panel.set_xscale("log")
        panel.set_xlabel(f"{label}, ms")
    axes[0].set_ylabel("share")
    axes[0].legend(fontsize=8, frameon=False)
    axes[0].set_title(f"load {load['load']:g}: {load['rate']:.1f} requests/s", loc="left", fontsize=10)


def _over_time(axes: list[Any], document: Document) -> None:
    for panel, load in zip(axes, document["loads"], strict=True):
        line = load["timeline"]
        panel.step(line["time"], line["live"], color=MEASURED, linewidth=1.4, label="measured")
        panel.step(line["time"], line["twin"], "--", color=PREDICTED, linewidth=1.4, label="predicted")
        panel.set_title(f"load {load['load']:g}", loc="left", fontsize=10)
        panel.set_xlabel("seconds")
        if len(line["pace"]) > 1:
            beside = panel.twinx()
            for factors in line["pace"].values():
                beside.plot(line["time"], factors, color=PACE, linewidth=0.6)
            beside.set_ylim(0, 3 * max(map(max, line["pace"].values())))
            beside.set_ylabel("pace (times as long as usual)", color=PACE, fontsize=8)
            beside.tick_params(colors=PACE, labelsize=7)
    axes[0].set_ylabel("requests in the system")
    axes[0].legend(fontsize=8, frameon=False)
