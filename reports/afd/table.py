"""The table of a ratio sweep, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]


def sweep_table(document: Document) -> RenderableType:
    """One table a configuration, each under a line that says what the theory and the simulation recommend."""
    parts: list[RenderableType] = []
    for index, configuration in enumerate(document["configurations"]):
        points = [point for point in document["points"] if point["configuration"] == index]
        parts += [Text(headline(configuration), style="bold"), _points_table(points, document["time_unit"])]
    parts.append(Text(footnote(document), style="dim"))
    return Group(*parts)


def headline(configuration: Document) -> str:
    """The answer in one sentence."""
    theory, simulation = configuration["theory"], configuration["simulation"]
    name = ", ".join(f"{key}={value}" for key, value in configuration["settings"].items())
    text = f"{name}: " if name else ""
    text += f"r* = {theory['r_star']:.2f} ({theory['regime']})"
    text += f", with barrier and pipeline {theory['r_star_barrier']:.2f}"
    if configuration["scenario"]["workload"]["arrivals"]["process"] != "closed_loop":
        text += ", both if every slot were full"
    low, high = simulation["best_range"]
    text += f"; simulated best {simulation['best_topology']}"
    text += f" (r = {low:g} to {high:g} are alike)" if high > low else ""
    if simulation["idle_crossing"] is not None:
        text += f"; idle ratios cross at r = {simulation['idle_crossing']:.1f}"
    return text


def footnote(document: Document) -> str:
    """What the columns mean."""
    unit = document["time_unit"]
    return (
        f"Simulated. Throughput in output tokens per {unit[:-1]} and instance: eq. 21 over the first 80 % of requests; "
        "steady with its 95 % interval; theory as published (eq. 6); barrier-aware theory. "
        "Gap: barrier-aware theory over steady simulation."
    )


def _points_table(points: list[Document], unit: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    headers = (
        "r",
        "bundle",
        "eq. 21",
        "steady",
        "± %",
        "theory",
        "barrier",
        "gap %",
        f"TPOT {unit}",
        "idle A",
        "idle F",
    )
    for title in headers:
        table.add_column(title, justify="right", no_wrap=True)
    for point in points:
        table.add_row(*_cells(point))
    return table


def _cells(point: Document) -> list[str]:
    steady, barrier = point["throughput_per_instance_steady"], point["throughput_per_instance_barrier"]
    spread = gap = "–"
    if steady is not None:
        low, high = point["throughput_ci"]
        spread = f"{50 * (high - low) / steady:.2f}"
        if barrier is not None:
            gap = f"{100 * (barrier / steady - 1):+.2f}"
    return [
        f"{point['ratio']:g}",
        point["topology"],
        _number(point["throughput_per_instance"]),
        _number(steady),
        spread,
        _number(point["throughput_per_instance_theory"]),
        _number(barrier),
        gap,
        _number(point["tpot"]),
        f"{100 * point['idle_attention']:.1f} %",
        f"{100 * point['idle_ffn']:.1f} %",
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
