"""Charts have what the document says, and pages charts, numbers and the manifest, with nothing from outside."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from reports.blocks import Chart, Curve, Figure
from reports.fields import axis_and_lines
from reports.theme import OUTAGE, PREDICTED
from tests.reports.pages.page_contents import Tables, columns, models, titles
from tests.reports.rendering import drawings_of, page_of, svgs_of
from tests.reports.serving.documents import measured, replicated, simulation, spread, sweep
from twin.api.run_folder import report

SVG = "{http://www.w3.org/2000/svg}"
MANIFEST = {"command": "twin simulate a<b.yaml", "commit": "0123abcd"}


def texts(svg: str) -> set[str]:
    return {element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")}


def paths(svg: str, style: str) -> list[list[tuple[float, float]]]:
    """Points of each clipped path of that style, in the figure's own units."""
    clipped = [path for path in ET.fromstring(svg).iter(f"{SVG}path") if style in path.get("style", "")]
    pairs = [re.findall(r"[ML] (\S+) (\S+)", path.get("d", "")) for path in clipped if path.get("clip-path")]
    return [[(float(x), float(y)) for x, y in path] for path in pairs]


def charts(document: dict[str, Any]) -> list[Chart]:
    return [chart for block in report(document) if isinstance(block, Figure) for chart in block.charts]


def curves(document: dict[str, Any], label: str) -> list[Curve]:
    return [curve for chart in charts(document) for curve in chart.curves if curve.label == label]


def shares(values: list[float]) -> list[float]:
    """The place of each value between the first and the last."""
    return [(value - values[0]) / (values[-1] - values[0]) for value in values]


def test_latencies_are_drawn_to_scale() -> None:
    svg = svgs_of(simulation())["latencies"]
    assert {"TTFT, ms", "TPOT, ms", "ITL, ms", "E2E, s", "chats & judges: latencies"} <= texts(svg)
    lines = [path for path in paths(svg, f"stroke: {PREDICTED}") if len(path) == 3]
    quantiles = simulation()["series"]["quantiles"]
    for line, name in zip(lines, ("ttft", "tpot", "itl", "e2e"), strict=True):
        assert shares([x for x, _ in line]) == pytest.approx(shares(quantiles[name]), abs=1e-4)
        assert shares([y for _, y in line]) == pytest.approx([0, 0.5, 1], abs=1e-4)


def test_a_run_of_which_no_request_counts_has_empty_panels() -> None:
    quantiles = dict.fromkeys(("ttft", "tpot", "itl", "e2e")) | {"p": [0, 0.5, 1]}
    svg = svgs_of(simulation(series=simulation()["series"] | {"quantiles": quantiles}))["latencies"]
    assert "predicted" not in texts(svg)
    assert len([text for text in texts(svg) if text.startswith(("TTFT,", "TPOT,", "ITL,", "E2E,"))]) == 4


def test_the_measured_run_has_lines_of_its_own() -> None:
    assert len(curves(measured(), "measured")) == 3  # of ITL nothing was measured
    assert {"predicted", "measured"} <= texts(svgs_of(measured())["latencies"])
    assert curves(measured(), "running, measured")[0].kind == "points"
    assert not curves(simulation(), "measured")


def test_curves_are_those_of_the_document() -> None:
    series = simulation()["series"]
    for name in ("running", "waiting"):
        (curve,) = curves(simulation(), f"{name}, predicted")
        assert (curve.x, curve.y) == (series["time"], series[name])
    page = page_of(measured())
    for name in ("ttft", "tpot", "itl", "e2e"):
        scale = 1 if name == "e2e" else 1000
        values = [scale * value for value in series["quantiles"][name]]
        assert {"x": pytest.approx(values), "y": [0, 50, 100]} in columns(page)
    real = [1000 * value for value in measured()["measured"]["quantiles"]["ttft"]]
    assert {"x": pytest.approx(real), "y": [0, 100]} in columns(page)
    assert {"x": [0.0, 1.0, 2.0], "y": [0, 75, 25]} in columns(page)


def test_outages_are_shaded_within_the_run() -> None:
    """The curves of the document reach from 0 to 2 s: one outage lies inside, one reaches beyond, one comes after."""
    spans = ((0.5, 1.0), (1.5, 9.0), (3.0, 4.0))
    document = simulation(outages=[{"engine": "engine-0", "start": start, "end": end} for start, end in spans])
    svg = svgs_of(document)["over-time"]
    (time, *_) = [path for path in paths(svg, f"stroke: {PREDICTED}") if len(path) == 3]
    (start, _), _, (end, _) = time
    boxes = [[2 * (x - start) / (end - start) for x, _ in path] for path in paths(svg, f"fill: {OUTAGE}")]
    assert [[min(box), max(box)] for box in boxes] == [pytest.approx(row, abs=1e-3) for row in 2 * [[0.5, 1], [1.5, 2]]]
    page = page_of(document)
    marks = [box for box in models(page, "BoxAnnotation") if box.get("tags") == ["outage"]]
    assert [(mark["left"], mark["right"]) for mark in marks] == 2 * [(0.5, 1.0), (1.5, 2.0)]
    assert ["engine-0", "0.5", "1"] in Tables(page).rows
    assert "outage" in texts(svg)
    assert "outage" not in texts(svgs_of(simulation())["over-time"])
    assert "<h2>Outages" not in page_of(simulation())


def test_a_run_without_detail_has_its_percentiles_and_no_figures() -> None:
    document = simulation(series=None)
    assert svgs_of(document) == {}
    assert {"x": [108, 180, 210, 300], "y": [50, 90, 95, 99]} in [
        {key: pytest.approx(values) for key, values in source.items()} for source in columns(page_of(document))
    ]
    assert len(titles(page_of(document))) == 4


def test_goals_are_lines_across_the_distributions() -> None:
    page = page_of(simulation(scenario={"measure": {"slo": {"ttft": 0.25, "tpot": 0.05}}}))
    assert [source["x"] for source in columns(page) if list(source) == ["x"]] == [[250], [50]]
    assert len(models(page, "VSpan")) > 0


# -- sweeps ------------------------------------------------------------------------------------------------------------


def points_of(*settings: dict[str, Any]) -> dict[str, Any]:
    return {**sweep(), "points": [simulation(settings=row) for row in settings]}


def test_a_sweep_has_a_line_for_each_setting_of_the_other_fields() -> None:
    throughput = charts(sweep())[0]
    assert (throughput.x_label, throughput.y_label) == ("workload.arrivals.rate", "output tokens/s")
    assert [(curve.label, list(curve.x), list(curve.y)) for curve in throughput.curves] == [
        ("engine.scheduling_policy=fcfs", [2, 4], [400.0, 600.0]),
        ("engine.scheduling_policy=priority", [2, 4], [440.0, None]),
    ]
    (ttft,) = [chart for chart in charts(sweep()) if chart.y_label == "mean TTFT, ms"]
    assert (ttft.curves[0].low, ttft.curves[0].high) == ([100, None], [140, None])
    svg = svgs_of(sweep())["sweep"]
    assert {"engine.scheduling_policy=fcfs", "workload.arrivals.rate", "output tokens/s", "P99 ITL, ms"} <= texts(svg)


def test_points_of_two_fields_are_drawn_over_the_one_that_spreads_them() -> None:
    """A field with three values makes the axis rather than one with two; a field with one value makes none."""
    document = points_of(*(
        {"engine.max_num_seqs": 64, "engine.scheduling_policy": policy, "workload.arrivals.rate": rate}
        for policy in ("fcfs", "priority") for rate in (2, 4, 8)
    ))  # fmt: skip
    assert next(select["value"] for select in models(page_of(document), "Select")) == "workload.arrivals.rate"
    assert [curve.x for curve in charts(document)[0].curves] == [[2, 4, 8], [2, 4, 8]]


def test_fields_that_vary_together_make_one_line() -> None:
    document = points_of(*({"system.replicas": n, "workload.arrivals.rate": 5 * n} for n in (1, 2, 4)))
    assert axis_and_lines([point["settings"] for point in document["points"]]) == ("system.replicas", [])
    assert all(len(chart.curves) == 1 for chart in charts(document))


def many_lines(count: int) -> dict[str, Any]:
    settings = [
        {"workload.arrivals.rate": rate, "engine.policy": f"p{index}"}
        for index in range(count)
        for rate in range(count + 1)
    ]
    return points_of(*settings)


@pytest.mark.parametrize("count", [3, 18])
def test_legends_are_outside_the_axes_and_short(count: int) -> None:
    figure = drawings_of(many_lines(count))["sweep"]
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 <= min(axes.get_window_extent().y0 for axes in figure.axes)
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert len(legend.get_texts()) <= 6


def test_labels_of_axes_are_inside_the_figure() -> None:
    document = sweep()
    for point in document["points"]:
        point["summary"]["output_throughput"] = 123456789.0
    for figure in (*drawings_of(document).values(), *drawings_of(simulation()).values()):
        figure.draw_without_rendering()
        for axes in figure.axes:
            extent = axes.yaxis.get_label().get_window_extent()
            assert extent.x0 >= 0
            assert extent.y0 >= 0
            assert extent.y1 <= figure.bbox.height


def test_an_overloaded_point_does_not_hide_the_others() -> None:
    document = sweep()
    document["points"][1]["summary"]["ttft"] = spread(120.0)
    assert [chart.log_y for chart in charts(document)] == [False, False, True, False]
    (buttons,) = models(page_of(document), "CheckboxButtonGroup")
    assert buttons["labels"][1] == "log vertical"
    assert 1 in buttons["active"]
    (plain,) = models(page_of(sweep()), "CheckboxButtonGroup")
    assert 1 not in plain["active"]


def test_a_page_of_a_sweep_has_every_point_to_explore() -> None:
    page = page_of(sweep(), MANIFEST)
    assert Tables(page).loaded == []
    points = columns(page)[0]
    assert points["workload.arrivals.rate"] == [2, 4, 2, 4]
    assert points["engine.scheduling_policy"] == ["fcfs", "fcfs", "priority", "priority"]
    assert points["output_throughput"][:3] == [400.0, 600.0, 440.0]
    assert math.isnan(points["ttft.p99"][3])
    headers = {column["title"]: column["field"] for column in models(page, "TableColumn")}
    assert headers["TTFT P99, s"] == "ttft.p99"
    options = {select["title"]: select["value"] for select in models(page, "Select")}
    axes = {"horizontal": "workload.arrivals.rate", "vertical": "ttft.p99", "colour": "engine.scheduling_policy"}
    assert options == axes
    assert {choice["title"] for choice in models(page, "MultiChoice")} == {"only rate", "only scheduling_policy"}


# -- pages of runs -----------------------------------------------------------------------------------------------------


def test_a_page_holds_everything_and_loads_nothing() -> None:
    page = page_of(simulation(outside={"batch": 300.0}), MANIFEST)
    tables = Tables(page)
    assert tables.loaded == []
    assert titles(page) == [
        "TTFT: Time from submission to the first token", "TPOT: Time per output token after the first",
        "ITL: Gap between consecutive tokens, pooled over requests", "E2E: Time from submission to the last token",
        "Who ran and who waited", "KV blocks in use",
    ]  # fmt: skip
    assert "<title>chats &amp; judges</title>" in page
    assert "twin simulate a&lt;b.yaml" in page
    assert "extrapolated: batch up to 300 lies outside" in page
    assert ["TTFT", "120 ms", "108 ms", "180 ms", "210 ms", "300 ms"] in tables.rows
    assert ["engine-0", "77", "0.625", "3"] in tables.rows
    assert "<h2>Links</h2>" not in page


LINKS = [{"name": "prefill-0", "utilization": 0.5, "bytes": 1e9, "mean_wait": 0.002}]


@pytest.mark.parametrize(
    ("document", "row"),
    [
        (replicated(), ["expectation", "110 – 130 ms", "–", "–", "–", "–"]),
        (replicated(), ["another run", "90 – 150 ms", "–", "–", "–", "–"]),
        (measured(), ["ttft.mean", "125 ms", "120 ms", "-4.00 %"]),
        (simulation(links=LINKS), ["prefill-0", "0.5", "1e+09", "0.002"]),
    ],
    ids=["expectation", "prediction", "measured", "links"],
)
def test_a_page_has_what_the_run_has(document: dict[str, Any], row: list[str]) -> None:
    assert row in Tables(page_of(document)).rows


def test_classes_of_requests_have_percentiles_and_distributions() -> None:
    document = simulation()
    document["series"]["classes"] = {
        name: {
            "requests": count, "ttft": spread(mean), "tpot": None, "e2e": spread(10 * mean),
            "quantiles": {"ttft": [mean, 2 * mean, 3 * mean], "tpot": None, "e2e": [1.0, 2.0, 3.0]},
        }
        for name, count, mean in (("chat", 30, 0.2), ("judge", 10, 0.05))
    }  # fmt: skip
    page = page_of(document)
    row = ["judge", "10", "TTFT", "50 ms", "45 ms", "75 ms", "87.5 ms", "125 ms"]
    assert row in Tables(page).rows
    assert {"TTFT by class of request", "E2E by class of request"} <= set(titles(page))
    assert "TPOT by class of request" not in titles(page)
    assert "By class" not in page_of(simulation())


def test_sessions_have_a_line_a_chart_and_a_table() -> None:
    document = simulation()
    document["summary"]["sessions"] = {
        "count": 8, "turns": 4.0, "time": spread(100.0), "waited": spread(20.0), "resent_tokens": 900,
        "resent_share": 0.9, "resent_cached": 0.5,
    }  # fmt: skip
    page = page_of(document)
    assert "8 sessions of 4 turns: 100 s to the last answer on average" in page
    assert ["waiting for answers", "20 s", "18 s", "30 s", "35 s", "50 s"] in Tables(page).rows
    assert "Time of a session" in titles(page)
    assert "<h2>Sessions" not in page_of(simulation())


def test_how_a_run_was_made_is_a_table_and_no_raw_json() -> None:
    scenario = {"workload": {"requests": 40}, "name": "a<b"}
    page = page_of(simulation(), {**MANIFEST, "packages": {"numpy": "2.0"}, "scenarios": [scenario]})
    rows = Tables(page).rows
    assert ["commit", "0123abcd"] in rows
    assert ["packages", "numpy 2.0"] in rows
    end = page[page.index("How this was made") : page.index("<script>\n")]
    assert "&quot;" not in end
    assert "- workload:\n    requests: 40\n  name: a&lt;b" in end
