"""Figures show what the document says, and pages hold figures, numbers and the manifest, with nothing from outside."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest

from reports.serving.figures import simulation_figures, sweep_figures
from reports.serving.page import simulation_page, sweep_page
from tests.reports.serving.documents import measured, replicated, simulation, sweep

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def curves(svg: str, colour: str) -> list[list[tuple[float, float]]]:
    """Points of each line of that colour with more than two points or none of a marker, in the figure's own units."""
    found = []
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        if f"stroke: {colour}" in path.get("style", "") and path.get("clip-path"):
            numbers = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
            found.append([(float(x), float(y)) for x, y in numbers])
    return found


def shares(values: list[float]) -> list[float]:
    """Where each value lies between the first and the last."""
    return [(value - values[0]) / (values[-1] - values[0]) for value in values]


def test_latencies_are_drawn_to_scale() -> None:
    svg = simulation_figures(simulation())["latencies"]
    assert {"TTFT, ms", "TPOT, ms", "ITL, ms", "E2E, s", "chats & judges: latencies"} <= set(texts(svg))
    drawn = [curve for curve in curves(svg, "#1f5fa8") if len(curve) == 3]
    assert len(drawn) == 4
    quantiles = simulation()["series"]["quantiles"]
    for curve, name in zip(drawn, ("ttft", "tpot", "e2e", "itl"), strict=True):
        assert shares([x for x, _ in curve]) == pytest.approx(shares(quantiles[name]), abs=1e-4)
        assert shares([y for _, y in curve]) == pytest.approx([0, 0.5, 1], abs=1e-4)


def test_a_run_of_which_no_request_counts_has_empty_panels() -> None:
    quantiles = dict.fromkeys(("ttft", "tpot", "itl", "e2e")) | {"p": [0, 0.5, 1]}
    series = simulation()["series"] | {"quantiles": quantiles}
    svg = simulation_figures(simulation(series=series))["latencies"]
    assert "TTFT, ms" in texts(svg)
    assert "predicted" not in texts(svg)


def test_the_measured_run_has_a_line_of_its_own() -> None:
    svg = simulation_figures(measured())["latencies"]
    assert {"predicted", "measured"} <= set(texts(svg))
    assert len([curve for curve in curves(svg, "#d1762b") if len(curve) == 2]) == 3  # of ITL nothing was measured
    assert "measured" not in texts(simulation_figures(simulation())["latencies"])
    over_time = texts(simulation_figures(measured())["over-time"])
    assert {"running, measured", "waiting, measured"} <= set(over_time)


def test_who_ran_and_waited_is_drawn_to_scale() -> None:
    svg = simulation_figures(simulation())["over-time"]
    assert {"running, predicted", "waiting, predicted", "requests", "KV blocks in use, %", "time, s"} <= set(texts(svg))
    running, used = [curve for curve in curves(svg, "#1f5fa8") if len(curve) == 3]
    (waiting,) = [curve for curve in curves(svg, "#2a8c5a") if len(curve) == 3]
    heights = {"running": running, "waiting": waiting, "kv_used": used}
    for name, curve in heights.items():
        values = simulation()["series"][name]
        bottom, top = curve[0][1], curve[1][1]
        assert [(y - bottom) / (top - bottom) for _, y in curve] == pytest.approx(
            [v / values[1] for v in values], abs=1e-4
        )


def test_outages_are_shaded_within_the_run() -> None:
    """The curves of the document reach from 0 to 2 s: one outage lies inside, one reaches beyond, one comes after."""
    outages = [
        {"engine": "engine-0", "start": start, "end": end} for start, end in ((0.5, 1.0), (1.5, 9.0), (3.0, 4.0))
    ]
    svg = simulation_figures(simulation(outages=outages))["over-time"]
    assert "outage" in texts(svg)
    (time, *_) = [curve for curve in curves(svg, "#1f5fa8") if len(curve) == 3]
    (left, _), _, (right, _) = time
    spans = []
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        if "fill: #c0392b" in path.get("style", "") and path.get("clip-path"):
            places = [float(x) for x, _ in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
            spans.append([2 * (x - left) / (right - left) for x in (min(places), max(places))])
    assert spans == [pytest.approx(each, abs=1e-3) for each in 2 * [[0.5, 1.0], [1.5, 2.0]]]
    assert "outage" not in texts(simulation_figures(simulation())["over-time"])


def test_a_run_without_detail_has_no_figures() -> None:
    assert simulation_figures(simulation(series=None)) == {}


def test_a_sweep_has_a_line_for_each_setting_of_the_other_fields() -> None:
    svg = sweep_figures(sweep())["sweep"]
    assert {
        "engine.scheduling_policy=fcfs",
        "engine.scheduling_policy=priority",
        "workload.arrivals.rate",
        "output tokens/s",
        "P99 ITL, ms",
    } <= set(texts(svg))
    throughput = next(curve for curve in curves(svg, "#1f5fa8") if len(curve) == 2)
    assert throughput[0][0] < throughput[1][0]
    assert throughput[0][1] > throughput[1][1]  # 400 to 600, and an SVG's y grows downwards


def test_settings_that_are_no_numbers_are_names_on_the_axis() -> None:
    document = sweep()
    for point in document["points"]:
        point["settings"] = {"engine.scheduling_policy": point["settings"]["engine.scheduling_policy"]}
    document["points"] = document["points"][1:3]
    assert {"fcfs", "priority", "engine.scheduling_policy"} <= set(texts(sweep_figures(document)["sweep"]))


def test_one_point_makes_no_figure() -> None:
    document = sweep()
    assert sweep_figures(document | {"points": document["points"][:1]}) == {}
    assert sweep_figures({**document, "points": [simulation(), simulation()]}) == {}


def test_figures_do_not_change_from_one_drawing_to_the_next() -> None:
    assert simulation_figures(measured()) == simulation_figures(measured())
    assert sweep_figures(sweep()) == sweep_figures(sweep())


# -- pages -------------------------------------------------------------------------------------------------------------


class Tables(HTMLParser):
    """Rows of cells, and whatever a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "tags that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [
            value for name, value in attrs if name in ("src", "href") and value and not value.startswith("#")
        ]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value for name, value in attrs if name == "src" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


MANIFEST = {"command": "twin simulate a<b.yaml", "commit": "0123abcd"}


def page_of(document: dict[str, Any]) -> str:
    return simulation_page(document, MANIFEST, simulation_figures(document))


def test_a_page_holds_everything_and_loads_nothing() -> None:
    page = page_of(simulation(outside={"batch": 300.0}))
    tables = Tables(page)
    assert tables.loaded == []
    assert page.count("<svg") == 2
    assert "<title>chats &amp; judges</title>" in page
    assert "twin simulate a&lt;b.yaml" in page
    assert "extrapolated: batch up to 300 lies outside" in page
    assert ["", "mean", "p50", "p90", "p95", "p99"] in tables.rows
    assert ["TTFT", "0.12", "0.108", "0.18", "0.21", "0.3"] in tables.rows
    assert ["engine-0", "77", "0.625", "3"] in tables.rows
    assert "<h2>Links</h2>" not in page


def test_a_page_of_several_runs_has_intervals() -> None:
    rows = Tables(page_of(replicated())).rows
    assert ["95 % of the expectation", "0.11 – 0.13", "–", "–", "–", "–"] in rows
    assert ["95 % of another run", "0.09 – 0.15", "–", "–", "–", "–"] in rows


def test_a_page_sets_what_was_measured_beside() -> None:
    page = page_of(measured())
    assert "<h2>Beside rtx/requests.jsonl</h2>" in page
    assert ["ttft.mean", "0.125", "0.12", "-4.00 %"] in Tables(page).rows


def test_a_page_of_engines_apart_has_links() -> None:
    page = page_of(simulation(links=[{"name": "prefill-0", "utilization": 0.5, "bytes": 1e9, "mean_wait": 0.002}]))
    assert ["prefill-0", "0.5", "1e+09", "0.002"] in Tables(page).rows


def test_a_page_lists_outages() -> None:
    page = page_of(simulation(outages=[{"engine": "engine-1", "start": 0.5, "end": 1.25}]))
    assert "<h2>Outages, seconds</h2>" in page
    assert ["engine-1", "0.5", "1.25"] in Tables(page).rows
    assert "<h2>Outages" not in page_of(simulation())


def test_a_page_of_a_sweep_has_a_row_for_each_point() -> None:
    page = sweep_page(sweep(), MANIFEST, sweep_figures(sweep()))
    tables = Tables(page)
    assert tables.loaded == []
    header, *rows = tables.rows
    assert header[:4] == ["workload.arrivals.rate", "engine.scheduling_policy", "TTFT mean, s", "TTFT p99, s"]
    assert header[-1] == "output tokens/s"
    assert rows[0] == ["2", "fcfs", "0.12", "0.3", "0.02", "0.065", "1.5", "400"]
    assert rows[3] == ["4", "priority", *["–"] * 6]
    assert page.count("<svg") == 1


def test_fixed_settings_are_told_once_and_not_drawn() -> None:
    document = sweep()
    for point in document["points"]:
        point["settings"] = {"engine.max_num_seqs": 640, **point["settings"]}
    figures = sweep_figures(document)
    assert figures == sweep_figures(sweep())
    page = sweep_page(document, {}, {})
    assert page.count("engine.max_num_seqs") == 1
    assert "All with engine.max_num_seqs=640." in page
