"""Charts of validations: each side's curves are those of the document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.blocks import Block, Report
from reports.html import page
from reports.validation import bundle_figures, latencies, over_time
from tests.reports.pages.page_contents import columns, models, titles


def load(**changes: Any) -> dict[str, Any]:
    return {
        "load": 0.5,
        "rate": 4.0,
        "curves": {"live": {"ttft": [0.1, 0.2, 0.4]}, "twin": {"ttft": [0.1, 0.3, 0.5]}},
        "timeline": {"time": [0.0, 1.0, 2.0], "live": [0, 3, 1], "twin": [0, 2, 1]},
        **changes,
    }


def page_of(figures: Sequence[Block]) -> str:
    return page(Report("validation", figures), {})


def test_both_sides_of_each_load_are_drawn() -> None:
    document = {"name": "x", "clock": "wall", "arriving": "requests", "loads": [load(), load()]}
    html = page_of([*(latencies(row, document) for row in document["loads"]), over_time(document)])
    pairs = [(source["x"], source["y"]) for source in columns(html) if "y" in source]
    assert pairs.count(([100, 200, 400], [0, 50, 100])) == 2
    assert pairs.count(([100, 300, 500], [0, 50, 100])) == 2
    assert pairs.count(([0.0, 1.0, 2.0], [0, 3, 1])) == 2
    assert titles(html).count("Requests in the system, load 0.5") == 2
    assert len(models(html, "Legend")) == 4


def test_bundles_are_drawn_over_their_ratios() -> None:
    def entry(ratio: int) -> dict[str, Any]:
        metrics = {
            name: {"measured": scale * ratio, "predicted": 2 * scale * ratio}
            for name, scale in (("throughput", 100.0), ("tpot", 0.001), ("idle_attention", 0.1), ("idle_ffn", 0.2))
        }
        return {"ratio": ratio, "metrics": metrics, "theory": {"barrier": 90.0 * ratio, "published": 95.0 * ratio}}

    document = {
        "name": "bundle",
        "clock": "direct",
        "missed": [],
        "ratios": [entry(1), entry(2)],
        "best_ratio": {"measured": 2},
        "timelines": {"2": {"time": [0.0, 1.0], "live": [0, 50], "twin": [0, 60]}},
    }
    html = page_of(bundle_figures(document))
    pairs = [(source["x"], source["y"]) for source in columns(html) if "y" in source]
    for heights in ([100, 200], [200, 400], [90, 180], [95, 190], [1.0, 2.0], [10, 20]):
        assert ([1, 2], heights) in pairs
    assert ([0.0, 1.0], [0, 60]) in pairs
    assert titles(html) == [
        "Throughput", "TPOT", "Idle share, attention", "Idle share, FFN", "Tokens over time, 2A-1F",
    ]  # fmt: skip
