"""SPEAR's table and figures on a document made by hand: what stands where, and what is said to disagree."""

from __future__ import annotations

import copy
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from papers.claims import disagreements
from papers.spear.report import figures as spear_figures
from papers.spear.report import tables as spear_table
from reports.blocks import Report, Text
from reports.layout import bullets, sections
from tests.reports.rendering import lines_of

Document = dict[str, Any]


def figure(published: float, predicted: float, reach: float) -> Document:
    low, high = predicted - reach, predicted + reach
    return {
        "published": published, "predicted": predicted, "error": predicted / published - 1,
        "confidence": [low, high], "prediction": [low, high], "inside": low <= published <= high,
    }  # fmt: skip


def row(chunk: int | None, goal: float | None, p99: Document, ttft: Document) -> Document:
    name = f"static-{chunk}" if chunk else f"SLO {1e3 * (goal or 0):g} ms"
    return {
        "scheduler": name, "chunk": chunk, "goal": goal, "density": "mid", "fitted": chunk is not None,
        "p99_itl": p99, "ttft": ttft, "meets": [],
    }  # fmt: skip


STATIC = row(256, None, figure(0.017, 0.0171, 0.0005), figure(0.060, 0.058, 0.004))
SLO = row(None, 0.022, figure(0.021, 0.022, 0.0), figure(0.050, 0.048, 0.001))
COARSE = row(None, 0.022, figure(0.021, 0.0205, 0.001), figure(0.050, 0.051, 0.002))
FIT = {"reading": "T(d) + T(c)", "sampling": "vllm", "misfit": 0.05, "misfit_p99_itl": 0.01, "misfit_ttft": 0.07}


@pytest.fixture
def document() -> Document:
    return copy.deepcopy(
        {
            "workload": {"rate": 16.0, "sampling": "vllm"},
            "fit": FIT,
            "rows": [STATIC, SLO],
            "coarse": {"step": 64, "rows": [COARSE]},
            "alternatives": [{**FIT, "reading": "T(d + c)", "rows": [SLO]}],
            "iteration": {
                "tokens": [1, 64], "w4": [4e-3, 5e-3], "compensators": [1e-3, 2e-3],
                "sparse": [4.15e-3, 5.3e-3], "mid": [4.38e-3, 5.76e-3], "dense": [4.6e-3, 6.2e-3],
            },
            "against_static": [
                {
                    "goal": 0.022, "density": "mid",
                    "sizes": [
                        {"static": 256, "published": -0.010, "predicted": -0.0095, "confidence": [-0.0105, -0.0085]},
                        {"static": 128, "published": -0.050, "predicted": None, "confidence": [-0.1, 0.1]},
                    ],
                }
            ],
            "claims": [
                {"where": "5.3.3", "what": "quicker", "published": "-10", "found": "-9", "agrees": True, "note": ""},
                {"where": "4.3", "what": "a line", "published": "so", "found": "no", "agrees": False, "note": "why"},
            ],
            "notes": ["nothing was measured"],
        }
    )  # fmt: skip


def printed(result: Report) -> list[str]:
    """Lines, every gap one space."""
    return [re.sub(" +", " ", line).strip() for line in lines_of(result)]


def test_printed_stands_beside_predicted(document: Document) -> None:
    lines = printed(spear_table(document))
    assert "static-256* mid 17.0 17.1 +0.6 % [16.6, 17.6] yes 60.0 58.0 -3.3 % [54.0, 62.0] yes" in lines
    assert "SLO 22 ms mid 21.0 22.0 +4.8 % [22.0, 22.0] no 50.0 48.0 -4.0 % [47.0, 49.0] no" in lines
    assert "SLO 22 ms mid 21.0 20.5 -2.4 % [19.5, 21.5] yes 50.0 51.0 +2.0 % [49.0, 53.0] yes" in lines


def test_every_static_size_that_keeps_the_goal_has_a_line(document: Document) -> None:
    lines = printed(spear_table(document))
    assert "22 mid 256 -10.0 -9.5 [-10.5, -8.5]" in lines
    assert "22 mid 128 -50.0 misses it" in lines


def test_other_readings_show_what_they_would_have_predicted(document: Document) -> None:
    lines = printed(spear_table(document))
    assert "T(d) + T(c) vllm 1.0 % 7.0 % +4.8 % to +4.8 % -4.0 % to -4.0 %" in lines
    assert any(line.startswith("T(d + c) vllm") for line in lines)
    assert "64 5.00 2.00 5.30 5.76 6.20" in lines


def test_disagreements_and_notes_are_in_words(document: Document) -> None:
    lines = printed(spear_table(document))
    at = lines.index("What disagrees")
    assert lines[at + 1 :] == ["- 4.3, a line: so printed, no found; why", "", "Notes", "- nothing was measured"]
    document["claims"] = document["claims"][:1]
    lines = printed(spear_table(document))
    assert lines[lines.index("What disagrees") + 1] == "nothing"


def test_figures_are_drawn_from_the_document(document: Document) -> None:
    figures = spear_figures(document)
    assert figures.keys() == {"tradeoff", "iteration"}
    for svg in figures.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert spear_figures(document) == figures
    labels = ElementTree.fromstring(figures["tradeoff"])
    words = {"".join(label.itertext()) for label in labels.iter("{http://www.w3.org/2000/svg}text")}
    assert {"256", "22 ms", "static, printed", "SLO, predicted", "SPEAR, Table 3: mid"} <= words
    document["rows"].append({**STATIC, "density": "dense"})
    assert "dense" in spear_figures(document)["tradeoff"]
    document["rows"][1]["ttft"]["predicted"] = 0.9
    assert spear_figures(document)["tradeoff"] != figures["tradeoff"]


def test_what_all_reports_are_made_of() -> None:
    assert printed(sections([("one", Text("a")), ("two", Text("b"))])) == ["one", "a", "", "two", "b"]
    assert bullets(["x", "y"]) == Text("x\ny", "list")
    assert disagreements([]) == Text("nothing")
