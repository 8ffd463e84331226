"""The self-contained HTML page of a ratio sweep: the answer, the figures, the numbers, and their origin."""

from __future__ import annotations

from html import escape
from typing import Any

from reports.afd.table import headline, memory_lines
from reports.html_page import cell, drawn_figures, table, whole_page
from reports.settings import fixed, in_words, varying

Document = dict[str, Any]

POINT_COLUMNS = {
    "ratio": "r",
    "topology": "bundle",
    "cards": "cards",
    "throughput_per_card_steady": "steady state per card",
    "throughput_per_instance": "throughput, eq. 21",
    "throughput_per_instance_steady": "steady state",
    "throughput_ci": "95 % interval",
    "throughput_per_instance_theory": "theory as published",
    "throughput_per_instance_barrier": "barrier-aware theory",
    "tpot": "TPOT, eq. 22",
    "idle_attention": "attention idle",
    "idle_ffn": "FFN idle",
    "regime": "regime",
    "fits": "fits in memory",
}
SHARES = ("idle_attention", "idle_ffn")


def sweep_page(document: Document, manifest: Document, figures: dict[str, str]) -> str:
    """The whole page as one text; figures are inlined SVG."""
    body = [f"<h1>{escape(document['name'])}: sweep over A/F ratios</h1>"]
    settings = [each["settings"] for each in document["configurations"]]
    keys, shared = varying(settings), fixed(settings)
    body += [f'<p class="answer">{escape(headline(each, keys))}</p>' for each in document["configurations"]]
    body += [f"<p>All with {escape(shared)}.</p>"] if shared else []
    body += [
        f'<p class="note">{escape(line)}</p>' for each in document["configurations"] for line in memory_lines(each)
    ]
    calibration = document["calibration"]
    note = f"{document['note']} Calibration: {calibration['name']} ({calibration['method']})."
    body.append(f'<p class="note">{escape(note)}</p>')
    body += drawn_figures(figures)
    for index, configuration in enumerate(document["configurations"]):
        points = [point for point in document["points"] if point["configuration"] == index]
        name = in_words(configuration["settings"], keys)
        body += [f"<h2>Points{': ' + escape(name) if name else ''}</h2>", _points(points), *_gaps(points, document)]
        body += ["<h2>Theory</h2>", _mapping(configuration["theory"])]
    return whole_page(document["name"], body, manifest)


def _points(points: list[Document]) -> str:
    rows = [[_share(point[key]) if key in SHARES else cell(point[key]) for key in POINT_COLUMNS] for point in points]
    return table(list(POINT_COLUMNS.values()), rows)


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
        "<h2>Why theory and simulation differ</h2>",
        f"<p>{intro}</p><ul class='note'>{meanings}</ul>",
        table(["r", *(name.replace("_", " ") for name in names)], rows),
    ]


def _mapping(values: Document) -> str:
    return table(["quantity", "value"], [[escape(key), cell(value)] for key, value in values.items()])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
