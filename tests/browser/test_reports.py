"""Reports in a browser: axes are chosen, points filtered and sorted, in light and dark, on wide and narrow screens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import model, opened
from tests.reports.rendering import page_of
from tests.reports.serving.documents import measured, simulation, spread, sweep

MOST_BYTES = 5_000_000


def many_points(count: int) -> dict[str, Any]:
    """A sweep over rate, sequences and policy whose metrics are drawn at random."""
    draw = random.Random(1)
    points = []
    for index in range(count):
        settings = {
            "workload.arrivals.rate": index % 40,
            "engine.max_num_seqs": 2 ** (index // 40 % 10),
            "engine.scheduling_policy": ("fcfs", "priority")[index % 2],
        }
        point = simulation(settings=settings, scenario={"measure": {"slo": {"ttft": 1.0}}})
        point["summary"] |= {name: spread(draw.expovariate(1.0) + 0.01) for name in ("ttft", "tpot", "itl", "e2e")}
        point["summary"] |= {"output_throughput": draw.uniform(100, 900), "goodput_share": draw.random()}
        del point["series"]
        points.append(point)
    return {**sweep(), "points": points}


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pages") / "report.html"
    file.write_text(page_of(many_points(2000), {"command": "twin sweep"}), encoding="utf-8")
    return file


def choose(tab: Any, title: str, label: str) -> None:
    """Choose an option of a list, as a user does."""
    tab.get_by_label(title, exact=True).select_option(label=label)


def words_below(tab: Any) -> str:
    """The words below the chart."""
    text: str = tab.evaluate(model("models.find((each) => each.type === 'Div' && each.text.includes('points')).text"))
    return text


def test_a_page_of_two_thousand_points_is_small_and_can_be_used(tab: Any, sweep_file: Path) -> None:
    assert sweep_file.stat().st_size <= MOST_BYTES
    opened(tab, sweep_file.as_uri())
    assert words_below(tab).startswith("2000 of 2000 points")
    choose(tab, "vertical", "output tokens/s")
    choose(tab, "horizontal", "tokens/s/user")
    figure = "models.find((each) => each.type === 'Figure')"
    labels = tab.evaluate(model(f"[{figure}.below[0].axis_label, {figure}.left[0].axis_label]"))
    assert labels == ["tokens/s/user", "output tokens/s"]
    places = tab.evaluate(model("Array.from(models.find((each) => each.data?.['#x']).data['#y'].slice(0, 3))"))
    assert places == [point["summary"]["output_throughput"] for point in many_points(3)["points"]]


def test_the_pareto_front_is_that_of_all_pairs(tab: Any, sweep_file: Path) -> None:
    opened(tab, sweep_file.as_uri())
    tab.get_by_role("button", name="throughput against interactivity").click()
    columns = "models.filter((each) => each.type === 'ColumnDataSource').map((each) => each.data)"
    front = tab.evaluate(
        model(f"{columns}.filter((data) => Object.keys(data).join() === 'x,y').map((data) => [data.x, data.y])[0]")
    )
    points = [(1 / point["summary"]["tpot"]["mean"], point["summary"]["output_throughput"])
              for point in many_points(2000)["points"]]  # fmt: skip
    best = [p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)]
    assert len(best) > 3
    assert sorted(zip(*front, strict=True)) == [pytest.approx(pair) for pair in sorted(best)]


def test_filters_leave_out_points_in_chart_and_table(tab: Any, sweep_file: Path) -> None:
    opened(tab, sweep_file.as_uri())
    filters = "models.find((each) => each.type === 'MultiChoice' && each.title === 'only scheduling_policy')"
    tab.evaluate(model(f"{filters}.value = ['priority']"))
    assert words_below(tab).startswith("1000 of 2000 points")
    slider = "models.find((each) => each.type === 'RangeSlider' && each.title === 'only TTFT P99, s')"
    tab.evaluate(model(f"{slider}.value = [0, 1]"))
    of_priority = [point for point in many_points(2000)["points"]
                   if point["settings"]["engine.scheduling_policy"] == "priority"]  # fmt: skip
    expected = [point for point in of_priority if point["summary"]["ttft"]["p99"] <= 1]
    assert words_below(tab).startswith(f"{len(expected)} of 2000 points")


def test_a_click_on_a_header_sorts_the_table(tab: Any, sweep_file: Path) -> None:
    opened(tab, sweep_file.as_uri())
    tab.locator(".slick-header-column", has_text="max_num_seqs").click()
    first = tab.locator(".slick-row").first.locator(".slick-cell").nth(1)
    assert first.inner_text() == "1"
    tab.locator(".slick-header-column", has_text="max_num_seqs").click()
    assert first.inner_text() == "512"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_follow_the_theme(tab: Any, sweep_file: Path, scheme: str) -> None:
    tab.emulate_media(color_scheme=scheme)
    opened(tab, sweep_file.as_uri())
    colour = "models.find((each) => each.type === 'Figure').background_fill_color"
    papers = {"light": "#ffffff", "dark": "#14171b"}
    assert tab.evaluate(model(colour)) == papers[scheme]
    tab.click("#theme")
    opposite = "dark" if scheme == "light" else "light"
    assert tab.evaluate(model(colour)) == papers[opposite]
    assert tab.evaluate("document.documentElement.dataset.theme") == opposite


def test_narrow_screens_need_no_sideways_scrolling(tab: Any, sweep_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    outage = {"engine": "engine-0", "start": 0.5, "end": 1.0}
    file.write_text(page_of({**measured(), "outages": [outage]}, {"command": "twin simulate " + 30 * "x"}))
    tab.set_viewport_size({"width": 390, "height": 800})
    for report in (file, sweep_file):
        opened(tab, report.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_legends_lie_below_the_plot(tab: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(page_of(measured(), {}), encoding="utf-8")
    opened(tab, file.as_uri())
    legends = tab.evaluate(
        model("models.filter((each) => each.type === 'Figure').map((each) => each.below.map((part) => part.type))")
    )
    assert ["LinearAxis", "Legend"] in legends
    assert tab.evaluate(model("models.filter((each) => each.type === 'Figure').every((each) => each.center.every("
                              "(part) => part.type !== 'Legend'))"))  # fmt: skip


def test_what_leaves_the_machine_is_noticed(chromium: Any, tmp_path: Path) -> None:
    """The check of the other tests, on a page that does ask another machine."""
    file = tmp_path / "leaky.html"
    file.write_text('<img src="http://192.0.2.1/x.png">')
    page = chromium.new_page()
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.route("http://**", lambda route: route.abort())
    page.goto(file.as_uri())
    page.close()
    assert "http://192.0.2.1/x.png" in urls
