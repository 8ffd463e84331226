"""Figures of a ratio sweep: throughput with both theories, idle ratios with their crossing, the three regimes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.afd.curves import curve_per_unit, interval_per_unit, rate_per_unit
from reports.afd.table import counts_cards
from reports.settings import in_words, varying
from reports.svg import svg_text

Document = dict[str, Any]

COLOURS = ("#1f5fa8", "#d1495b", "#2a8c5a", "#8a5fbf", "#c77f1a", "#4a4a4a")
ATTENTION, FFN, LINK = "#1f5fa8", "#d1762b", "#2a8c5a"


def sweep_figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    return {name: svg_text(draw(document)) for name, draw in sweep_drawings(document).items()}


def sweep_drawings(document: Document) -> dict[str, Callable[[Document], Figure]]:
    """The functions that draw the figures, by name; idle times and regimes for a single configuration only."""
    panels = {"throughput": _throughput}
    if len(document["configurations"]) == 1:
        panels |= {"idle": _idle, "regimes": _regimes}
    return {name: functools.partial(_render, draw) for name, draw in panels.items()}


def _render(draw: Callable[[Axes, Document], None], document: Document) -> Figure:
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    draw(axes, document)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    _ratio_axis(axes, document)
    return figure


def _ratio_axis(axes: Axes, document: Document) -> None:
    ratios = [point["ratio"] for point in document["points"]]
    if max(ratios) / min(ratios) > 6:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("attention instances per FFN instance, r")


def _throughput(axes: Axes, document: Document) -> None:
    """Draw throughput: per card if instances of any configuration have several, else per instance, as in the paper."""
    keys = varying([configuration["settings"] for configuration in document["configurations"]])
    per_card = any(counts_cards(configuration) for configuration in document["configurations"])
    for index, configuration in enumerate(document["configurations"]):
        points = [point for point in document["points"] if point["configuration"] == index]
        colour = COLOURS[index % len(COLOURS)]
        name = in_words(configuration["settings"], keys)
        prefix = f"{name}: " if name else ""
        _throughput_curves(axes, configuration, points, colour, prefix, "card" if per_card else "instance")
    axes.set_ylabel(f"output tokens per {document['time_unit'][:-1]} and {'card' if per_card else 'instance'}")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{document['name']}: simulated throughput against theory", loc="left", fontsize=10)
    axes.legend(fontsize=7.5, frameon=False)


def _throughput_curves(
    axes: Axes, configuration: Document, points: list[Document], colour: str, prefix: str, unit: str
) -> None:
    """Draw one configuration; `unit`: `instance` or `card`, by which throughput is divided."""
    theory, curves = configuration["theory"], configuration["curves"]
    label = (lambda text: None) if prefix else (lambda text: text)
    published, barrier = (curve_per_unit(configuration, name, unit) for name in ("theory", "barrier"))
    dashed = label("theory as published (eq. 6)")
    axes.plot(curves["ratio"], published, "--", color=colour, lw=1, alpha=0.7, label=dashed)
    solid = label("barrier- and pipeline-aware theory")
    axes.plot(curves["ratio"], barrier, "-", color=colour, lw=1.4, label=solid)
    ratios = [point["ratio"] for point in points]
    measured = [point[f"throughput_per_{unit}"] for point in points]
    axes.plot(ratios, measured, "x", color=colour, ms=5, label=f"{prefix}simulated, first 80 % (eq. 21)")
    steady = [point for point in points if point["throughput_per_instance_steady"] is not None]
    if steady:
        centre = [point[f"throughput_per_{unit}_steady"] for point in steady]
        spread = [
            [abs(interval_per_unit(point, unit)[end] - rate_per_unit(point, unit)) for point in steady]
            for end in (0, 1)
        ]
        axes.errorbar(
            [point["ratio"] for point in steady], centre, spread, fmt="o", ms=4, mfc="white", color=colour, capsize=2,
            label=label("simulated, steady state with 95 % interval"),
        )  # fmt: skip
    unfit = [point for point in points if point["fits"] is False]
    if unfit:
        centre = [rate_per_unit(point, unit) for point in unfit]
        axes.plot(
            [point["ratio"] for point in unfit], centre, "X", color="#b00020", ms=9, zorder=4,
            label=f"{prefix}does not fit in memory",
        )  # fmt: skip
    star = theory["r_star" if unit == "instance" else "r_star_per_card"]
    low, high = curves["ratio"][0], curves["ratio"][-1]
    if low <= star <= high:
        source = "as published (eq. 19)" if unit == "instance" else "per card (eq. 19 by cards)"
        axes.axvline(star, color=colour, ls=":", lw=1, label=label(f"r* = {star:.2f} {source}"))


def _idle(axes: Axes, document: Document) -> None:
    points = sorted(document["points"], key=lambda point: point["ratio"])
    ratios = [point["ratio"] for point in points]
    axes.plot(ratios, [100 * point["idle_attention"] for point in points], "o-", color=ATTENTION, label="attention")
    axes.plot(ratios, [100 * point["idle_ffn"] for point in points], "s-", color=FFN, label="FFN")
    crossing = document["configurations"][0]["simulation"]["idle_crossing"]
    if crossing is not None:
        axes.axvline(crossing, color="#666", ls=":", lw=1, label=f"crossing at r = {crossing:.1f}")
    axes.set_ylabel("idle time, % (eq. 23, simulated)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{document['name']}: who waits for whom", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _regimes(axes: Axes, document: Document) -> None:
    configuration = document["configurations"][0]
    theory, curves = configuration["theory"], configuration["curves"]
    ratios = curves["ratio"]
    for name, colour, label in (
        ("attention", ATTENTION, "attention at the mean load"),
        ("communication", LINK, "communication, round trip"),
        ("ffn", FFN, "FFN"),
    ):
        axes.plot(ratios, curves[f"t_{name}"], color=colour, lw=1.4, label=label)
    axes.plot(ratios, curves["t_step"], color="black", lw=1, ls="-.", label="step, barrier- and pipeline-aware")
    critical = theory["r_critical"]
    bound = "I attention-bound" if theory["r_attention"] >= theory["r_communication"] else "II communication-bound"
    colour = ATTENTION if bound.startswith("I a") else LINK
    edge = min(max(critical, ratios[0]), ratios[-1])
    axes.axvspan(ratios[0], edge, color=colour, alpha=0.07)
    axes.axvspan(edge, ratios[-1], color=FFN, alpha=0.07)
    top = 0.97
    for left, right, text in ((ratios[0], edge, bound), (edge, ratios[-1], "III FFN-bound")):
        if right > left * 1.3:
            axes.text(
                (left * right) ** 0.5,
                top,
                text,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="top",
                fontsize=8,
            )
    axes.axvline(theory["r_star"], color="#666", ls=":", lw=1, label=f"r* = {theory['r_star']:.2f}")
    axes.set_xlim(ratios[0], ratios[-1])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{document['time_unit']} per decode step")
    axes.set_title(f"{document['name']}: the three regimes of the published theory", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="center left")
