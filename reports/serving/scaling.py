"""Autoscaled runs: charts for a page, and what figures share with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reports.pages.frame import Part

Document = dict[str, Any]

UP, STARTING, DRAINING, FAILED = "#1f5fa8", "#d1762b", "#8a8a8a", "#c0392b"
STATES = {"up": UP, "starting": STARTING, "draining": DRAINING, "failed": FAILED}
"""States of engines and their colours, from the bottom of a stack to its top."""


def shown_latency(document: Document) -> str:
    """The latency whose P99 is shown: the one with a goal, TTFT first."""
    slo = document["scenario"]["measure"]["slo"]
    return next((name for name in ("ttft", "tpot", "e2e") if name in slo), "ttft")


def requests_per_second(minutes: Document) -> list[float]:
    """Requests/s of each minute."""
    return [count / 60 for count in minutes["requests"]]


def scaling_parts(document: Document) -> list[Part]:
    """Load, engines and P99 over time, on one time axis, for a page."""
    found, series = document.get("autoscaling"), document.get("series")
    if not found or not series:
        return []
    from reports.pages.charts import Curve, timeline
    from reports.pages.theme import MEASURED, PREDICTED

    minutes, outages = found["minutes"], document.get("outages") or []
    shaded = ", outages shaded" if outages else ""
    times = minutes["start"]
    rates = Curve("requests/s", times, requests_per_second(minutes), PREDICTED)
    load = timeline(f"Load by minute{shaded}", [rates], "requests/s", outages)
    lines = [Curve(name, series["time"], series["engines"][name], colour) for name, colour in STATES.items()
             if any(series["engines"][name]) or name == "up"]  # fmt: skip
    engines = timeline(f"Engines{shaded}", lines, "engines", outages, x_range=load.x_range)
    name = shown_latency(document)
    curves = [Curve(f"P99 {name.upper()}", times, minutes[f"{name}_p99"], PREDICTED)]
    goal = document["scenario"]["measure"]["slo"].get(name)
    if goal is not None and times:
        curves.append(Curve("goal", [times[0], series["time"][-1]], [goal, goal], MEASURED, "dashed"))
    latency = timeline(f"P99 {name.upper()} by minute{shaded}", curves, "s", outages, x_range=load.x_range)
    return ["<h2>Autoscaling</h2>", [load, engines, latency]]
