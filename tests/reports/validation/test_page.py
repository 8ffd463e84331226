"""Charts of validations: each side's curves are those of the document."""

from __future__ import annotations

from typing import Any

from reports.pages.frame import whole_page
from reports.validation.page import bundle_charts, validation_charts
from tests.reports.pages.page_contents import columns, models, titles


def load(**changes: Any) -> dict[str, Any]:
    return {
        "load": 0.5,
        "rate": 4.0,
        "curves": {"live": {"ttft": [0.1, 0.2, 0.4]}, "twin": {"ttft": [0.1, 0.3, 0.5]}},
        "timeline": {"time": [0.0, 1.0, 2.0], "live": [0, 3, 1], "twin": [0, 2, 1]},
        **changes,
    }


def test_both_sides_of_each_load_are_drawn() -> None:
    page = whole_page("validation", validation_charts({"missed": ["TTFT"], "loads": [load(), load()]}), {})
    assert page.index("<li>TTFT</li>") < page.index("<h2>Load")
    drawn = columns(page)
    pairs = [(each["x"], each["y"]) for each in drawn if "y" in each]
    assert pairs.count(([0.1, 0.2, 0.4], [0, 50, 100])) == 2
    assert pairs.count(([0.1, 0.3, 0.5], [0, 50, 100])) == 2
    assert pairs.count(([0.0, 1.0, 2.0], [0, 3, 1])) == 2
    assert titles(page).count("Requests in the system") == 2
    assert len(models(page, "Legend")) == 4


def test_bundles_are_drawn_over_their_ratios() -> None:
    def entry(ratio: int) -> dict[str, Any]:
        metrics = {
            name: {"measured": scale * ratio, "predicted": 2 * scale * ratio}
            for name, scale in (("throughput", 100.0), ("tpot", 0.001), ("idle_attention", 0.1), ("idle_ffn", 0.2))
        }
        return {"ratio": ratio, "metrics": metrics, "theory": {"barrier": 90.0 * ratio, "published": 95.0 * ratio}}

    document = {
        "clock": "direct",
        "missed": [],
        "ratios": [entry(1), entry(2)],
        "best_ratio": {"measured": 2},
        "timelines": {"2": {"time": [0.0, 1.0], "live": [0, 50], "twin": [0, 60]}},
    }
    page = whole_page("bundle", bundle_charts(document), {})
    pairs = [(each["x"], each["y"]) for each in columns(page) if "y" in each]
    for heights in ([100, 200], [200, 400], [90, 180], [95, 190], [1.0, 2.0], [10, 20]):
        assert ([1, 2], heights) in pairs
    assert ([0.0, 1.0], [0, 60]) in pairs
    assert titles(page) == [
        "Throughput", "TPOT", "Idle share, attention", "Idle share, FFN", "Tokens over time, 2A-1F",
    ]  # fmt: skip
