"""What-if pages show no number, curve or title of another question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.twin.page.scenarios import roofline
from twin.page.application import title_of
from twin.page.questions import DRAFT_REQUESTS, Inquiry, _afd, _simulated
from twin.page.view import View


@pytest.fixture
def inquiry() -> Inquiry:
    return Inquiry(roofline(), Path("s.yaml"))


def view_of(inquiry: Inquiry) -> View:
    return View(inquiry.knobs, inquiry.choices({}), lambda choices: None)


def points(view: View) -> int:
    return sum(len(source.data["x"]) for chart in view.charts.values() for source in chart.curves.values())


def test_an_error_leaves_no_number_of_an_earlier_answer(inquiry: Inquiry) -> None:
    view, choices = view_of(inquiry), inquiry.choices({})
    view.show("full", _simulated(inquiry, {}, DRAFT_REQUESTS // 10))
    view.show("afd", _afd(inquiry, choices))
    view.show("pareto", {"name": "TP 1", "load": 1.0, "user": 50.0, "gpu": 900.0, "rate": 4.0})
    assert points(view) > 10
    assert "TTFT" in view.answer.text
    view.show("error", {"text": "out of memory"})
    assert "out of memory" in view.status.text
    assert (points(view), view.answer.text, view.afd_note.text) == (0, "", "")


def test_an_error_at_once_ends_the_simulating(inquiry: Inquiry) -> None:
    view = view_of(inquiry)
    assert "simulating" in view.answer.text
    view.show("error", {"text": "out of memory"})
    assert "simulating" not in view.answer.text


def test_titles_say_what_was_changed(inquiry: Inquiry) -> None:
    assert title_of("llama", {}) == "llama: what if"
    choices = inquiry.choices({"model": "qwen3-32b", "tp": "2"})
    title = title_of("llama", inquiry.link(choices))
    assert title == "llama: what if model qwen3-32b, tp 2?"
    view = view_of(inquiry)
    view.begin("name: llama\n", "model=qwen3-32b", title)
    assert view.link.tags == ["model=qwen3-32b", title]


def test_an_ffn_of_several_gpus_counts_as_several(inquiry: Inquiry) -> None:
    choices = inquiry.choices({"model": "deepseek-v3", "gpu": "h200-sxm", "weights": "fp8"})
    bundle: dict[str, Any] = _afd(inquiry, choices)
    assert bundle["cards"]["ffn"] > 1
    best = bundle["theory"]["throughput_per_card_at_r_star"]
    assert max(bundle["curves"]["theory"]) <= best * 1.0001
    assert max(bundle["curves"]["theory"]) > 0.8 * best
