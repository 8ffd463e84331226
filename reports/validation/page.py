"""Charts of the pages of `twin validate`: what was measured beside what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reports.pages.charts import Curve, curves, distribution
from reports.pages.fields import LATENCIES
from reports.pages.theme import MEASURED, PREDICTED, SOFT, WAITING
from reports.validation.table import arriving, clock_of
from reports.validation.verdict import verdict_parts

if TYPE_CHECKING:
    from reports.pages.frame import Part

Document = dict[str, Any]

SIDES = {"live": ("measured", MEASURED), "twin": ("forecast", PREDICTED)}
"""Label and colour of each side."""


def validation_charts(document: Document) -> list[Part]:
    """The verdict; latency distributions of each load, requests in the system."""
    parts = verdict_parts(document)
    for load in document["loads"]:
        rate = f"{load['rate']:.1f} {arriving(document)}/s"
        parts.append(f"<h2>Load {load['load']:g}: {rate}; clock: {clock_of(document)}</h2>")
        parts.append([*_latencies(load), *_over_time(load)])
    return parts


def bundle_charts(document: Document) -> list[Part]:
    """The verdict; throughput, TPOT and idle shares over the ratio, and tokens over time at the measured optimum."""
    entries = document["ratios"]
    theories = [
        Curve(label, _ratios(entries), [entry["theory"][name] for entry in entries], colour, "dashed")
        for name, label, colour in (
            ("barrier", "theory with barrier", WAITING), ("published", "theory as published", SOFT),
        )
    ]  # fmt: skip
    axis = "attention instances per FFN instance, r"
    charts = [curves("Throughput", [*_sides(entries, "throughput"), *theories], axis, "tokens/s per instance")]
    if all("tpot" in entry["metrics"] for entry in entries):
        charts.append(curves("TPOT", _sides(entries, "tpot", 1e3), axis, "TPOT, ms"))
    for role, label in (("attention", "attention"), ("ffn", "FFN")):
        charts.append(curves(f"Idle share, {label}", _sides(entries, f"idle_{role}", 100), axis, "idle time, %"))
    best = document["best_ratio"]["measured"]
    line = document["timelines"][str(best)]
    found = [Curve(label, line["time"], line[side], colour) for side, (label, colour) in SIDES.items()]
    charts.append(curves(f"Tokens over time, {best}A-1F", found, "time, s", "tokens"))
    return [*verdict_parts(document), f"<p class='note'>Clock: {document['clock']}.</p>", charts]


def _latencies(load: Document) -> list[Any]:
    charts = []
    for name, (label, meaning) in LATENCIES.items():
        found, colours = {}, []
        for side, (text, colour) in SIDES.items():
            values = load["curves"][side].get(name)
            if values:
                found[text] = (values, [index / max(len(values) - 1, 1) for index in range(len(values))])
                colours.append(colour)
        if found:
            title = f"{label}: {meaning.partition(':')[0]}"
            charts.append(distribution(title, found, f"{label}, s", colours=colours))
    return charts


def _over_time(load: Document) -> list[Any]:
    line = load["timeline"]
    found = [Curve(label, line["time"], line[side], colour) for side, (label, colour) in SIDES.items()]
    return [curves("Requests in the system", found, "time, s", "requests")]


def _sides(entries: Sequence[Document], name: str, factor: float = 1.0) -> list[Curve]:
    return [
        Curve(label, _ratios(entries), [factor * entry["metrics"][name][side] for entry in entries], colour, "both")
        for side, label, colour in (("measured", "live", MEASURED), ("predicted", "twin", PREDICTED))
    ]


def _ratios(entries: Sequence[Document]) -> list[float]:
    return [entry["ratio"] for entry in entries]
