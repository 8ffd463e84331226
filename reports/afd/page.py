"""The page of a ratio sweep that one can explore: the answer, charts, the points, and their origin."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from reports.afd.curves import curve_per_unit, interval_per_unit, rate_per_unit
from reports.afd.table import counts_cards, headline, memory_lines
from reports.html_page import cell, table
from reports.pages.charts import Curve, curves
from reports.pages.explorer import View, explorer
from reports.pages.fields import Field, setting_fields
from reports.pages.frame import whole_page
from reports.pages.theme import SERIES, series_colours
from reports.settings import fixed, in_words, varying

if TYPE_CHECKING:
    from bokeh.models import UIElement

    from reports.pages.frame import Part

Document = dict[str, Any]

MANY = 10
"""Configurations from which on the chart of throughput leaves out theories: the explorer has them."""

POINT_COLUMNS = {
    "ratio": ("r", "Attention instances for one FFN instance", 0),
    "topology": ("bundle", "Attention and FFN instances", 0),
    "cards": ("cards", "Cards of the whole bundle", -1),
    "throughput_per_card_steady": ("steady state per card", "Output tokens per time unit and card", 1),
    "throughput_per_instance": ("throughput, eq. 21", "Per instance, of the first 80 % of requests to complete", 1),
    "throughput_per_instance_steady": ("steady state", "Output tokens per time unit and instance", 1),
    "throughput_per_instance_theory": ("theory as published", "Eq. 6, per instance", 1),
    "throughput_per_instance_barrier": ("barrier-aware theory", "Per instance, with barrier and pipeline", 1),
    "tpot": ("TPOT, eq. 22", "Mean over requests of (completion − first token)/D", -1),
    "idle_attention": ("attention idle", "Eq. 23, share of the time", -1),
    "idle_ffn": ("FFN idle", "Eq. 23, share of the time", -1),
    "attention_memory": ("attention card, bytes", "Weights and KV cache on an attention card", -1),
    "regime": ("regime", "The stage that sets the published cycle time", 0),
    "fits": ("fits in memory", "Whether attention and FFN cards hold weights and cache", 0),
}
"""Fields of a point: label, meaning, and whether more or less is better."""


def sweep_page(document: Document, manifest: Document) -> str:
    """The whole page as one text."""
    configurations = document["configurations"]
    settings = [each["settings"] for each in configurations]
    keys, shared = varying(settings), fixed(settings)
    calibration = document["calibration"]
    note = f"{document['note']} Calibration: {calibration['name']} ({calibration['method']})."
    many = len(configurations) > MANY
    answers = [_answer(each, keys) for each in configurations]
    parts: list[Part] = [
        f"<h1>{escape(document['name'])}: sweep over A/F ratios</h1>",
        *(["<details><summary>Every configuration in a sentence</summary>"] if many else []),
        *answers,
        *(["</details>"] if many else []),
        *([f"<p>All with {escape(shared)}.</p>"] if shared else []),
        f'<p class="note">{escape(note)}</p>',
        *ratio_charts(document),
        "<h2>Points</h2>",
        _explorer(document),
    ]
    for index, configuration in enumerate(configurations if not many else ()):
        points = [point for point in document["points"] if point["configuration"] == index]
        name = in_words(configuration["settings"], keys)
        title = f"Theory: {escape(name)}" if name else "Theory"
        parts += [f"<h2>{title}</h2>", *_gaps(points, document), _mapping(configuration["theory"])]
    return whole_page(document["name"], parts, manifest)


def ratio_charts(document: Document) -> list[Part]:
    """Throughput over r, and of a single configuration idle times and stage times."""
    if len(document["configurations"]) > 1:
        return [_throughput(document)]
    return [[_throughput(document), _idle(document), _stages(document)]]


def _answer(configuration: Document, keys: Sequence[str]) -> str:
    lines = [f'<p class="answer">{escape(headline(configuration, keys))}</p>']
    lines += [f'<p class="note">{escape(line)}</p>' for line in memory_lines(configuration)]
    return "\n".join(lines)


def _is_logarithmic(ratios: Sequence[float]) -> bool:
    return max(ratios) / min(ratios) > 6


def _throughput(document: Document) -> UIElement:
    """Throughput per card if instances of any configuration have several, else per instance, as in the paper."""
    configurations = document["configurations"]
    keys = varying([each["settings"] for each in configurations])
    unit = "card" if any(counts_cards(each) for each in configurations) else "instance"
    colours = series_colours(len(configurations)) if len(configurations) > 1 else []
    lines: list[Curve] = []
    marks: dict[str, float] = {}
    shows_theory = len(configurations) <= MANY
    for index, configuration in enumerate(configurations):
        points = [point for point in document["points"] if point["configuration"] == index]
        name = in_words(configuration["settings"], keys)
        lines += _configuration_lines(configuration, points, unit, name, colours[index] if colours else None,
                                      theory=shows_theory)  # fmt: skip
        if not name:
            star = configuration["theory"]["r_star" if unit == "instance" else "r_star_per_card"]
            marks[f"r* = {star:.2f} by eq. 19"] = star
    label = f"output tokens per {document['time_unit'][:-1]} and {unit}"
    theories = "; dashed: theory as published, solid: with barrier and pipeline" if colours and shows_theory else ""
    return curves(f"Throughput: {label}{theories}", lines, "attention instances per FFN instance, r", "throughput",
                  log_x=_is_logarithmic([point["ratio"] for point in document["points"]]), marks=marks,
                  height=380)  # fmt: skip


def _configuration_lines(
    configuration: Document, points: Sequence[Document], unit: str, name: str, colour: str | None, *, theory: bool
) -> list[Curve]:
    ratios = configuration["curves"]["ratio"]
    single = (SERIES[1], SERIES[2], SERIES[0]) if colour is None else (colour, colour, colour)
    lines = []
    if theory:
        published, barrier = (curve_per_unit(configuration, each, unit) for each in ("theory", "barrier"))
        lines += [
            Curve(name or "theory as published", ratios, published, single[0], "dashed"),
            Curve(name or "barrier-aware theory", ratios, barrier, single[1]),
        ]
    found = sorted(points, key=lambda point: float(point["ratio"]))
    ends = [interval_per_unit(point, unit) for point in found]
    names = [_point_name(point) for point in found]
    lines.append(
        Curve(name or "simulated, 95 % interval", [point["ratio"] for point in found],
              [rate_per_unit(point, unit) for point in found], single[2], "points" if theory else "both",
              [low for low, _ in ends], [high for _, high in ends], names)
    )  # fmt: skip
    return lines


def _point_name(point: Document) -> str:
    return f"{point['topology']}{'' if point['fits'] is not False else ', does not fit in memory'}"


def _idle(document: Document) -> UIElement:
    points = sorted(document["points"], key=lambda point: float(point["ratio"]))
    ratios = [point["ratio"] for point in points]
    names = [point["topology"] for point in points]
    lines = [
        Curve(label, ratios, [100 * point[f"idle_{stage}"] for point in points], None, "both", names=names)
        for label, stage in (("attention", "attention"), ("FFN", "ffn"))
    ]
    crossing = document["configurations"][0]["simulation"]["idle_crossing"]
    marks = {} if crossing is None else {f"crossing at r = {crossing:.1f}": crossing}
    return curves("Who waits for whom (eq. 23)", lines, "r", "idle time, %", log_x=_is_logarithmic(ratios), marks=marks)


def _stages(document: Document) -> UIElement:
    configuration = document["configurations"][0]
    theory, found = configuration["theory"], configuration["curves"]
    labels = {
        "attention": "attention at the mean load", "communication": "communication, round trip", "ffn": "FFN",
        "step": "step, with barrier and pipeline",
    }  # fmt: skip
    lines = [
        Curve(label, found["ratio"], found[f"t_{name}"], kind="dashed" if name == "step" else "solid")
        for name, label in labels.items()
    ]
    marks = {f"FFN-bound from r = {theory['r_critical']:.2f}": theory["r_critical"]}
    low, high = found["ratio"][0], found["ratio"][-1]
    marks = {label: place for label, place in marks.items() if low <= place <= high}
    unit = document["time_unit"]
    return curves(f"What a decode step takes, {unit}", lines, "r", unit, log_x=_is_logarithmic(found["ratio"]),
                  marks=marks)  # fmt: skip


def _explorer(document: Document) -> Part:
    points = document["points"]
    settings = [document["configurations"][point["configuration"]]["settings"] for point in points]
    fields = setting_fields(settings)
    colour = fields[0].key if fields else "regime"
    for key, (label, meaning, better) in POINT_COLUMNS.items():
        values = [_plain(point[key]) for point in points]
        if any(value is not None for value in values):
            fields.append(Field(key, label, values, meaning, better, setting=key == "ratio"))
    known = {each.key for each in fields}
    steady = "throughput_per_instance_steady"
    rate = next(key for key in ("throughput_per_card_steady", steady, "throughput_per_instance") if key in known)
    views = [View("throughput", "ratio", rate, colour), View("throughput against TPOT", "tpot", rate, colour, True)]
    return explorer(fields, views, [_point_name(point) for point in points])


def _plain(value: Any) -> float | str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value  # type: ignore[no-any-return]


def _gaps(points: list[Document], document: Document) -> list[str]:
    """The factors from the published formula to the measured eq. 21, in per cent."""
    explained = [point for point in points if point["gaps"] is not None]
    if not explained:
        return []
    names = list(explained[0]["gaps"])
    rows = [
        [cell(point["ratio"]), *(f"{100 * (point['gaps'][name] - 1):+.2f}" for name in names)] for point in explained
    ]
    meanings = "".join(
        f"<li>{escape(name.replace('_', ' '))}: {escape(document['gap_names'][name])}</li>" for name in names
    )
    intro = "From the published formula (eq. 6) to the simulated eq. 21, in per cent; they multiply to the whole gap."
    return [
        "<h3>Why theory and simulation differ</h3>",
        f"<p>{intro}</p><ul class='note'>{meanings}</ul>",
        table(["r", *(name.replace("_", " ") for name in names)], rows),
    ]


def _mapping(values: Document) -> str:
    rows = table(["quantity", "value"], [[escape(key), cell(value)] for key, value in values.items()])
    return f"<details><summary>Closed forms</summary>{rows}</details>"
