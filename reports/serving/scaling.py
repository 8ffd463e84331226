"""Autoscaled runs: lines for a terminal, a figure, and charts for a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reports.serving.table import milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from reports.pages.frame import Part

Document = dict[str, Any]

UP, STARTING, DRAINING, FAILED = "#1f5fa8", "#d1762b", "#8a8a8a", "#c0392b"
STATES = {"up": UP, "starting": STARTING, "draining": DRAINING, "failed": FAILED}
"""States of engines and their colours, from the bottom of a stack to its top."""


def scaling_lines(summary: Document) -> list[str]:
    """GPU-hours, what they cost, and the minutes in which goals were missed; and latencies around outages."""
    lines: list[str] = []
    found = summary.get("autoscaling")
    if found:
        hours, cost = found["gpu_hours"], found["cost"]
        text = f"{found['engine_hours']:,.4g} engine-hours" if hours is None else f"{hours:,.4g} GPU-hours"
        text += "" if cost is None else f" for {cost:,.2f}"
        text += "".join(
            f"; {name}: {pool['mean_engines']:.3g} engines on average, {pool['most_engines']:.0f} at most"
            for name, pool in found["pools"].items()
        )
        text += f"; {found['started']:.0f} started, {found['stopped']:.0f} stopped"
        if found["missed_minutes"] is not None:
            text += f"; {found['missed_minutes']:.1%} of minutes missed"
        lines.append(text)
    around = summary.get("outages")
    if around:
        lines.append("P99 TTFT " + ", ".join(f"{_around(part, around)}" for part in around))
    return lines


def _around(part: str, around: Document) -> str:
    requests, ttft, share = around[part]["requests"], around[part]["ttft"], around[part].get("goodput_share")
    name = {"during": "during outages", "after": "after them"}.get(part, part)
    text = f"{name} {milliseconds(ttft['p99']) if ttft else 'of no request'}"
    return text + (f" ({share:.1%} of {requests:g} requests within goals)" if share is not None else "")


def _p99(document: Document) -> str:
    """The latency that is shown: the one with a goal, TTFT first."""
    slo = document["scenario"]["measure"]["slo"]
    return next((name for name in ("ttft", "tpot", "e2e") if name in slo), "ttft")


def _rates(minutes: Document) -> list[float]:
    """Requests/s of each minute."""
    return [count / 60 for count in minutes["requests"]]


def scaling_figure(document: Document) -> Figure:
    """Requests, engines, and P99 of each minute, over time, with outages shaded."""
    from reports.serving.figures import MEASURED, PREDICTED, canvas, shade_outages

    found, figure, panels = document["autoscaling"], *canvas(7.6, 6.4, 3, 1)
    load, engines, latency = panels
    minutes, end = found["minutes"], document["series"]["time"][-1]
    load.step(minutes["start"], _rates(minutes), where="post", color=PREDICTED, lw=1.2)
    load.set_ylabel("requests/s")
    load.set_title(f"{document['name']}: load, engines and P99 by minute", loc="left", fontsize=10)
    series = document["series"]
    stack = [series["engines"][name] for name in STATES]
    engines.stackplot(series["time"], *stack, labels=list(STATES), colors=list(STATES.values()), step="post", lw=0)
    engines.set_ylabel("engines")
    engines.legend(fontsize=8, frameon=False, ncols=4, loc="upper left")
    name = _p99(document)
    values = minutes[f"{name}_p99"]
    latency.step(minutes["start"], [float("nan") if each is None else each for each in values], where="post",
                 color=PREDICTED, lw=1.2)  # fmt: skip
    goal = document["scenario"]["measure"]["slo"].get(name)
    if goal is not None:
        latency.axhline(goal, color=MEASURED, lw=1, ls="--")
        latency.set_yscale("log")
    latency.set_ylabel(f"P99 {name.upper()}, s")
    latency.set_xlabel("time, s")
    for axes in panels:
        shade_outages(axes, document.get("outages") or [], end)
        axes.set_xlim(0, end)
    for axes in (load, engines):
        axes.set_ylim(bottom=0)
    return figure


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
    load = timeline(f"Load by minute{shaded}", [Curve("requests/s", times, _rates(minutes), PREDICTED)], "requests/s",
                    outages)  # fmt: skip
    lines = [Curve(name, series["time"], series["engines"][name], colour) for name, colour in STATES.items()
             if any(series["engines"][name]) or name == "up"]  # fmt: skip
    engines = timeline(f"Engines{shaded}", lines, "engines", outages, x_range=load.x_range)
    name = _p99(document)
    curves = [Curve(f"P99 {name.upper()}", times, minutes[f"{name}_p99"], PREDICTED)]
    goal = document["scenario"]["measure"]["slo"].get(name)
    if goal is not None and times:
        curves.append(Curve("goal", [times[0], series["time"][-1]], [goal, goal], MEASURED, "dashed"))
    latency = timeline(f"P99 {name.upper()} by minute{shaded}", curves, "s", outages, x_range=load.x_range)
    return ["<h2>Autoscaling</h2>", [load, engines, latency]]
