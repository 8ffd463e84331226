"""The self-contained HTML page of a ratio sweep: the answer, the figures, the numbers, and their origin."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from reports.afd.table import headline, memory_lines
from reports.settings import fixed, in_words, varying

Document = dict[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4 } th { border-bottom-color: #999 }
td:first-child, th:first-child { text-align: left }
.scroll { overflow-x: auto } figure { margin: 1rem 0 } figure svg { width: 100%; max-width: 50rem; height: auto }
td { white-space: nowrap }
.answer { font-size: 1.1rem; border-left: 4px solid #1f5fa8; padding-left: .8rem }
.note { color: #555; font-size: 13px } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12px }
"""

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
    body += [f"<figure>{_inline(svg)}</figure>" for svg in figures.values()]
    for index, configuration in enumerate(document["configurations"]):
        points = [point for point in document["points"] if point["configuration"] == index]
        name = in_words(configuration["settings"], keys)
        body += [f"<h2>Points{': ' + escape(name) if name else ''}</h2>", _points(points), *_gaps(points, document)]
        body += ["<h2>Theory</h2>", _mapping(configuration["theory"])]
    body += ["<h2>How this was made</h2>", f"<pre>{escape(json.dumps(manifest, indent=1))}</pre>"]
    title = escape(document["name"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _points(points: list[Document]) -> str:
    rows = [[_share(point[key]) if key in SHARES else _cell(point[key]) for key in POINT_COLUMNS] for point in points]
    return _table(list(POINT_COLUMNS.values()), rows)


def _gaps(points: list[Document], document: Document) -> list[str]:
    """The factors from the published formula to the measured eq. 21, in per cent."""
    explained = [point for point in points if point["gaps"] is not None]
    if not explained:
        return []
    names = list(explained[0]["gaps"])
    rows = [
        [_cell(point["ratio"]), *(f"{100 * (point['gaps'][name] - 1):+.2f}" for name in names)] for point in explained
    ]
    meanings = "".join(
        f"<li>{escape(name.replace('_', ' '))}: {escape(document['gap_names'][name])}</li>" for name in names
    )
    intro = "From the published formula (eq. 6) to the simulated eq. 21, in per cent; they multiply to the whole gap."
    return [
        "<h2>Why theory and simulation differ</h2>",
        f"<p>{intro}</p><ul class='note'>{meanings}</ul>",
        _table(["r", *(name.replace("_", " ") for name in names)], rows),
    ]


def _mapping(values: Document) -> str:
    return _table(["quantity", "value"], [[escape(key), _cell(value)] for key, value in values.items()])


def _table(headers: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    lines = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{lines}</table></div>'


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return " – ".join(_cell(each) for each in value)
    return escape(str(value))


def _inline(svg: str) -> str:
    """An SVG file's root element, without its XML declaration and doctype."""
    return svg[svg.index("<svg") :]
