"""Self-contained HTML pages of serving runs: the answer, the figures, the numbers, and their origin."""

from __future__ import annotations

from html import escape
from typing import Any

from reports.html_page import cell, drawn_figures, table, whole_page
from reports.serving.table import LATENCIES, MEANS, POINTS, error_parts, footnote, headline, sweep_footnote, warnings
from reports.settings import fixed, varying

Document = dict[str, Any]


def simulation_page(document: Document, manifest: Document, figures: dict[str, str]) -> str:
    """The page of one scenario."""
    body = [
        f"<h1>{escape(document['name'])}</h1>",
        f'<p class="answer">{escape(headline(document))}</p>',
        f'<p class="note">{escape(footnote(document))}</p>',
        *(f"<p><strong>{escape(text)}</strong></p>" for text in warnings(document)),
        *drawn_figures(figures),
        "<h2>Latencies, seconds</h2>",
        _latencies(document),
        *(f"<p>{escape(text)}</p>" for text in error_parts(document)),
        _assumptions(document),
    ]
    if document.get("comparison"):
        rows = [
            [escape(name), cell(row["measured"]), cell(row["predicted"]), f"{100 * row['error']:+.2f} %"]
            for name, row in document["comparison"].items()
        ]
        title = f"<h2>Beside {escape(document['measured']['source'])}</h2>"
        body += [title, table(["", "measured", "predicted", "error"], rows)]
    body += ["<h2>Engines</h2>", _entries(document["engines"])]
    if document["links"]:
        body += ["<h2>Links</h2>", _entries(document["links"])]
    if document.get("outages"):
        body += ["<h2>Outages, seconds</h2>", _entries(document["outages"])]
    return whole_page(document["name"], body, manifest)


def sweep_page(document: Document, manifest: Document, figures: dict[str, str]) -> str:
    """The page of a sweep."""
    points = document["points"]
    settings = [point["settings"] for point in points]
    keys, shared = varying(settings), fixed(settings)
    rows = [
        [
            *(escape(str(point["settings"][key])) for key in keys),
            *(cell(point["summary"][name] and point["summary"][name][key]) for name, key in SWEPT),
            cell(point["summary"]["output_throughput"]),
        ]
        for point in points
    ]
    headers = [*keys, *(f"{LATENCIES[name]} {key}, s" for name, key in SWEPT), "output tokens/s"]
    note = f'<p class="note">{escape(sweep_footnote(points))}</p>'
    alike = [f"<p>All with {escape(shared)}.</p>"] if shared else []
    body = [f"<h1>{escape(document['name'])}: sweep</h1>", *alike, note, *drawn_figures(figures), table(headers, rows)]
    return whole_page(document["name"], body, manifest)


SWEPT = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("itl", "p99"), ("e2e", "mean"))


def _latencies(document: Document) -> str:
    rows = []
    for name, label in LATENCIES.items():
        values = document["summary"][name]
        if values is None:
            continue
        rows.append([label, *(cell(values[point]) for point in POINTS)])
        for kind, text in (("confidence", "95 % of the expectation"), ("prediction", "95 % of another run")):
            intervals = [document["intervals"].get(f"{name}.{point}") for point in POINTS]
            if any(intervals):
                rows.append([text, *(cell(each and each[kind]) for each in intervals)])
    return table(["", *POINTS], rows)


def _assumptions(document: Document) -> str:
    """Assumptions, the most costly first."""
    found = document.get("assumptions") or []
    headers = ["what costs most: deviation by each alone", *MEANS.values(), "known by", "measure next"]
    rows = [
        [each["about"], *(f"{100 * each['deviation'].get(name, 0.0):.2g} %" for name in MEANS), each["basis"],
         each["measure"]]
        for each in found
    ]  # fmt: skip
    return table(headers, rows) if rows else ""


def _entries(entries: list[Document]) -> str:
    return table(list(entries[0]), [[cell(value) for value in entry.values()] for entry in entries])
