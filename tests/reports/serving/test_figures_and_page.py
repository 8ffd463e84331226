"""Figures show what the document says, and pages hold figures, numbers and the manifest, with nothing from outside."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from matplotlib.colors import to_hex

from reports.pages.theme import MEASURED, OUTAGE, PREDICTED, WAITING, series_colours
from reports.settings import axis_and_lines
from tests.reports.pages.page_contents import Tables, columns, models, titles
from tests.reports.rendering import drawings_of, page_of, svgs_of
from tests.reports.serving.documents import measured, replicated, simulation, spread, sweep

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
    """The place of each value between the first and the last."""
    return [(value - values[0]) / (values[-1] - values[0]) for value in values]


def test_latencies_are_drawn_to_scale() -> None:
    svg = svgs_of(simulation())["latencies"]
    assert {"TTFT, ms", "TPOT, ms", "ITL, ms", "E2E, s", "chats & judges: latencies"} <= set(texts(svg))
    drawn = [curve for curve in curves(svg, PREDICTED) if len(curve) == 3]
    assert len(drawn) == 4
    quantiles = simulation()["series"]["quantiles"]
    for curve, name in zip(drawn, ("ttft", "tpot", "itl", "e2e"), strict=True):
        assert shares([x for x, _ in curve]) == pytest.approx(shares(quantiles[name]), abs=1e-4)
        assert shares([y for _, y in curve]) == pytest.approx([0, 0.5, 1], abs=1e-4)


def test_a_run_of_which_no_request_counts_has_empty_panels() -> None:
    quantiles = dict.fromkeys(("ttft", "tpot", "itl", "e2e")) | {"p": [0, 0.5, 1]}
    series = simulation()["series"] | {"quantiles": quantiles}
    svg = svgs_of(simulation(series=series))["latencies"]
    assert "TTFT, ms" in texts(svg)
    assert "predicted" not in texts(svg)


def test_the_measured_run_has_a_line_of_its_own() -> None:
    svg = svgs_of(measured())["latencies"]
    assert {"predicted", "measured"} <= set(texts(svg))
    assert len([curve for curve in curves(svg, MEASURED) if len(curve) == 2]) == 3  # of ITL nothing was measured
    assert "measured" not in texts(svgs_of(simulation())["latencies"])
    over_time = texts(svgs_of(measured())["over-time"])
    assert {"running, measured", "waiting, measured"} <= set(over_time)


def test_who_ran_and_waited_is_drawn_to_scale() -> None:
    svg = svgs_of(simulation())["over-time"]
    assert {"running, predicted", "waiting, predicted", "requests", "KV blocks in use, %", "time, s"} <= set(texts(svg))
    running, used = [curve for curve in curves(svg, PREDICTED) if len(curve) == 3]
    (waiting,) = [curve for curve in curves(svg, WAITING) if len(curve) == 3]
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
    svg = svgs_of(simulation(outages=outages))["over-time"]
    assert "outage" in texts(svg)
    (time, *_) = [curve for curve in curves(svg, PREDICTED) if len(curve) == 3]
    (left, _), _, (right, _) = time
    spans = []
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        if f"fill: {OUTAGE}" in path.get("style", "") and path.get("clip-path"):
            places = [float(x) for x, _ in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
            spans.append([2 * (x - left) / (right - left) for x in (min(places), max(places))])
    assert spans == [pytest.approx(each, abs=1e-3) for each in 2 * [[0.5, 1.0], [1.5, 2.0]]]
    assert "outage" not in texts(svgs_of(simulation())["over-time"])


def test_a_run_without_detail_has_no_figures() -> None:
    assert svgs_of(simulation(series=None)) == {}


def test_a_sweep_has_a_line_for_each_setting_of_the_other_fields() -> None:
    svg = svgs_of(sweep())["sweep"]
    assert {
        "engine.scheduling_policy=fcfs",
        "engine.scheduling_policy=priority",
        "workload.arrivals.rate",
        "output tokens/s",
        "P99 ITL, ms",
    } <= set(texts(svg))
    throughput = next(curve for curve in curves(svg, PREDICTED) if len(curve) == 2)
    assert throughput[0][0] < throughput[1][0]
    assert throughput[0][1] > throughput[1][1]  # 400 to 600, and an SVG's y grows downwards


def test_settings_that_are_no_numbers_are_names_on_the_axis() -> None:
    document = sweep()
    for point in document["points"]:
        point["settings"] = {"engine.scheduling_policy": point["settings"]["engine.scheduling_policy"]}
    document["points"] = document["points"][1:3]
    assert {"fcfs", "priority", "engine.scheduling_policy"} <= set(texts(svgs_of(document)["sweep"]))


def test_one_point_makes_no_figure() -> None:
    document = sweep()
    assert svgs_of(document | {"points": document["points"][:1]}) == {}
    assert svgs_of({**document, "points": [simulation(), simulation()]}) == {}


def test_figures_do_not_change_from_one_drawing_to_the_next() -> None:
    assert svgs_of(measured()) == svgs_of(measured())
    assert svgs_of(sweep()) == svgs_of(sweep())


# -- pages -------------------------------------------------------------------------------------------------------------


MANIFEST = {"command": "twin simulate a<b.yaml", "commit": "0123abcd"}


def test_a_page_holds_everything_and_loads_nothing() -> None:
    page = page_of(simulation(outside={"batch": 300.0}), MANIFEST)
    tables = Tables(page)
    assert tables.loaded == []
    assert titles(page)[:2] == [
        "TTFT: Time from submission to the first token",
        "TPOT: Time per output token after the first",
    ]
    assert titles(page)[4:] == ["Who ran and who waited", "KV blocks in use"]
    assert "<title>chats &amp; judges</title>" in page
    assert "twin simulate a&lt;b.yaml" in page
    assert "extrapolated: batch up to 300 lies outside" in page
    assert ["", "mean", "p50", "p90", "p95", "p99"] in tables.rows
    assert ["TTFT", "0.12 s", "0.108 s", "0.18 s", "0.21 s", "0.3 s"] in tables.rows
    assert ["engine-0", "77", "0.625", "3"] in tables.rows
    assert "<h2>Links</h2>" not in page


def test_a_page_of_several_runs_has_intervals() -> None:
    rows = Tables(page_of(replicated())).rows
    assert ["expectation", "0.11 – 0.13 s", "–", "–", "–", "–"] in rows
    assert ["another run", "0.09 – 0.15 s", "–", "–", "–", "–"] in rows


def test_a_page_sets_what_was_measured_beside() -> None:
    page = page_of(measured())
    assert "<h2>beside rtx/requests.jsonl</h2>" in page
    assert ["ttft.mean", "0.125 s", "0.12 s", "-4.00 %"] in Tables(page).rows


def test_a_page_of_engines_apart_has_links() -> None:
    page = page_of(simulation(links=[{"name": "prefill-0", "utilization": 0.5, "bytes": 1e9, "mean_wait": 0.002}]))
    assert ["prefill-0", "0.5", "1e+09", "0.002"] in Tables(page).rows


def test_a_page_lists_outages() -> None:
    page = page_of(simulation(outages=[{"engine": "engine-1", "start": 0.5, "end": 1.25}]))
    assert "<h2>Outages, seconds</h2>" in page
    assert ["engine-1", "0.5", "1.25"] in Tables(page).rows
    assert "<h2>Outages" not in page_of(simulation())


def test_distributions_of_a_page_are_those_of_the_document() -> None:
    page = page_of(measured())
    quantiles = simulation()["series"]["quantiles"]
    for name in ("ttft", "tpot", "itl", "e2e"):
        scale = 1 if name == "e2e" else 1000
        assert {"x": pytest.approx([scale * value for value in quantiles[name]]), "y": [0, 50, 100]} in columns(page)
    real = measured()["measured"]["quantiles"]
    assert {"x": pytest.approx([1000 * value for value in real["ttft"]]), "y": [0, 100]} in columns(page)


def test_goals_are_lines_across_the_distributions() -> None:
    goals = {"measure": {"slo": {"ttft": 0.25, "tpot": 0.05}}}
    page = page_of(simulation(scenario=goals))
    assert [each["x"] for each in columns(page) if list(each) == ["x"]] == [[250], [50]]
    assert len(models(page, "VSpan")) > 0


def test_a_run_without_detail_shows_its_percentiles() -> None:
    page = page_of(simulation(series=None))
    assert {"x": [108, 180, 210, 300], "y": [50, 90, 95, 99]} in [
        {key: pytest.approx(values) for key, values in each.items()} for each in columns(page)
    ]
    assert len(titles(page)) == 4


def test_outages_are_marked_on_the_timelines() -> None:
    outages = [{"engine": "engine-0", "start": 0.5, "end": 1.0}, {"engine": "engine-0", "start": 1.5, "end": 9.0}]
    boxes = models(page_of(simulation(outages=outages)), "BoxAnnotation")
    shaded = [(each["left"], each["right"]) for each in boxes if each.get("tags") == ["outage"]]
    assert shaded == 2 * [(0.5, 1.0), (1.5, 2.0)]


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
    assert ["judge", "10", "TTFT", "0.05 s", "0.045 s", "0.075 s", "0.0875 s", "0.125 s"] in Tables(page).rows
    assert {"TTFT by class of request", "E2E by class of request"} <= set(titles(page))
    assert "TPOT by class of request" not in titles(page)
    assert "By class" not in page_of(simulation())


def test_sessions_have_a_line_a_chart_and_a_table() -> None:
    found = {"count": 8, "turns": 4.0, "time": spread(100.0), "waited": spread(20.0), "resent_tokens": 900,
             "resent_share": 0.9, "resent_cached": 0.5}  # fmt: skip
    document = simulation()
    document["summary"]["sessions"] = found
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


def test_a_page_of_a_sweep_has_every_point_to_explore() -> None:
    page = page_of(sweep(), MANIFEST)
    assert Tables(page).loaded == []
    found = columns(page)[0]
    assert found["workload.arrivals.rate"] == [2, 4, 2, 4]
    assert found["engine.scheduling_policy"] == ["fcfs", "fcfs", "priority", "priority"]
    assert found["output_throughput"][:3] == [400.0, 600.0, 440.0]
    assert math.isnan(found["ttft.p99"][3])
    headers = {each["title"]: each["field"] for each in models(page, "TableColumn")}
    assert headers["TTFT P99, s"] == "ttft.p99"
    options = {each["title"]: each["value"] for each in models(page, "Select")}
    assert options == {
        "horizontal": "workload.arrivals.rate",
        "vertical": "ttft.p99",
        "colour": "engine.scheduling_policy",
    }
    assert {each["title"] for each in models(page, "MultiChoice")} == {"only rate", "only scheduling_policy"}


def test_points_of_two_fields_are_drawn_over_the_one_that_spreads_them() -> None:
    """A field with three values makes the axis rather than one with two; a field with one value makes none."""
    points = []
    for policy in ("fcfs", "priority"):
        for rate in (2, 4, 8):
            fields = {"engine.max_num_seqs": 64, "engine.scheduling_policy": policy, "workload.arrivals.rate": rate}
            points.append(simulation(settings=fields))
    document = {**sweep(), "points": points}
    svg = svgs_of(document)["sweep"]
    assert {"workload.arrivals.rate", "engine.scheduling_policy=priority"} <= set(texts(svg))
    assert next(each["value"] for each in models(page_of(document, {}), "Select")) == "workload.arrivals.rate"
    curve = next(curve for curve in curves(svg, PREDICTED) if len(curve) == 3)
    assert len({x for x, _ in curve}) == 3


def test_fields_that_vary_together_make_one_line() -> None:
    document = sweep()
    document["points"] = [
        simulation(settings={"system.replicas": n, "workload.arrivals.rate": 5 * n}) for n in (1, 2, 4)
    ]
    assert axis_and_lines([point["settings"] for point in document["points"]]) == ("system.replicas", [])
    assert len([curve for curve in curves(svgs_of(document)["sweep"], PREDICTED) if len(curve) == 3]) == 4


def many_lines(count: int) -> dict[str, Any]:
    points = [
        simulation(settings={"workload.arrivals.rate": rate, "engine.policy": f"p{index}"})
        for index in range(count)
        for rate in range(count + 1)
    ]
    return {**sweep(), "points": points}


def test_legends_are_outside_the_axes_and_short() -> None:
    for count in (3, 18):
        figure = drawings_of(many_lines(count))["sweep"]
        figure.draw_without_rendering()
        (legend,) = figure.legends
        bottom = min(axes.get_window_extent().y0 for axes in figure.axes)
        assert legend.get_window_extent().y1 <= bottom
        assert all(axes.get_legend() is None for axes in figure.axes)
        assert len(legend.get_texts()) <= 6


def test_no_two_lines_have_the_same_colour() -> None:
    figure = drawings_of(many_lines(100))["sweep"]
    colours = {to_hex(line.get_color()) for line in figure.axes[0].get_lines()}
    assert len(colours) == 100
    assert len(set(series_colours(100))) == 100


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
    figure = drawings_of(document)["sweep"]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "log", "linear"]
    (buttons,) = models(page_of(document, {}), "CheckboxButtonGroup")
    assert buttons["labels"][1] == "log vertical"
    assert 1 in buttons["active"]
    (plain,) = models(page_of(sweep(), {}), "CheckboxButtonGroup")
    assert 1 not in plain["active"]


def test_fixed_settings_are_told_once_and_not_drawn() -> None:
    document = sweep()
    for point in document["points"]:
        point["settings"] = {"engine.max_num_seqs": 640, **point["settings"]}
    figures = svgs_of(document)
    assert figures == svgs_of(sweep())
    page = page_of(document, {})
    assert page.count("engine.max_num_seqs") == 1
    assert "orders with engine.max_num_seqs=640" in page


def test_equal_documents_make_equal_pages() -> None:
    assert page_of(simulation()) == page_of(simulation())
    assert page_of(sweep(), MANIFEST) == page_of(sweep(), MANIFEST)
