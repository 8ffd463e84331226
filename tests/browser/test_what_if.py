"""The what-if page in a browser: answers follow sliders, links restore choices, and scenarios can be taken along."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

import twin
from tests.browser.conftest import model, opened
from tests.twin.page.scenarios import roofline

START = "import sys; from twin.cli import main; main(sys.argv[1:])"
NAMED = "Bokeh.documents[0].get_model_by_name"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a page of a scenario of 320 requests, served by the command."""
    folder = tmp_path_factory.mktemp("what-if")
    (folder / "s.yaml").write_text(yaml.safe_dump(roofline()))
    command = [sys.executable, "-c", START, "page", str(folder / "s.yaml"), "--port", "0", "--no-browser"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            match = re.search(r"http://127\.0\.0\.1:\d+/", server.stderr.readline())
            yield match[0]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)


def answered(tab: Any, condition: str = "true") -> None:
    """Wait until all requests are answered, and the condition holds."""
    answer_shown = f"{NAMED}('status')?.text.includes('all 320') && {condition}"
    tab.wait_for_function(f"window.Bokeh && Bokeh.documents.length > 0 && {answer_shown}", timeout=120_000)


def test_an_answer_follows_a_slider_and_the_link_restores_it(tab: Any, address: str) -> None:
    opened(tab, address)
    answered(tab)
    before = tab.evaluate(model("models.find((each) => each.type === 'Div' && each.text.includes('goodput')).text"))
    tab.locator(".noUi-handle").first.focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    answered(tab, f"{NAMED}('rate').value > 4")
    in_link = "parseFloat(new URLSearchParams(location.search).get('rate'))"
    tab.wait_for_function(f"Math.abs({in_link} - {NAMED}('rate').value) < 1e-5 && {in_link} > 4.2", timeout=60_000)
    rate = float(parse_qs(urlsplit(tab.url).query)["rate"][0])
    assert rate > 4
    tab.wait_for_function(f"""{NAMED}('scenario').value.includes('rate: {rate:g}')""")
    tab.reload()
    answered(tab, f"Math.abs({NAMED}('rate').value - {rate}) < 1e-5")
    after = tab.evaluate(model("models.find((each) => each.type === 'Div' && each.text.includes('goodput')).text"))
    assert after != before


def test_the_scenario_written_gives_the_answer_shown(tab: Any, address: str, tmp_path: Path) -> None:
    opened(tab, f"{address}?rate=6&answer=120&layout=apart&seqs=64")
    answered(tab)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="write the scenario").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    assert file.name == "what-if.yaml"
    summary = twin.simulate(file).document["summary"]
    text = tab.evaluate(model("models.find((each) => each.type === 'Div' && each.text.includes('goodput')).text"))
    for latency in ("ttft", "tpot", "e2e"):
        assert f"<td>{summary[latency]['p99']:.5g}</td>" in text


def test_curves_are_drawn_after_the_answer(tab: Any, address: str) -> None:
    opened(tab, f"{address}?rate=3")
    points = "models.filter((each) => each.type === 'ColumnDataSource' && 'rate' in each.data)"
    all_points = points.replace("models", "[...Bokeh.documents[0]._all_models.values()]")
    ready = f"{all_points}.some((each) => each.data.x.length > 4)"
    tab.wait_for_function(f"window.Bokeh && Bokeh.documents.length && {ready}", timeout=120_000)
    curve = f"({points}).filter((each) => each.data.x.length > 4)[0].data"
    x, rate = tab.evaluate(model(f"[{curve}.x, {curve}.rate]"))
    assert rate == sorted(rate)
    assert x == sorted(x, reverse=True)  # a user gets fewer tokens a second, the higher the load
    notes = tab.evaluate(model("models.filter((each) => each.type === 'Div').map((each) => each.text)"))
    assert any("r* = " in text for text in notes)


def test_what_cannot_be_is_told_in_a_line(tab: Any, address: str) -> None:
    opened(tab, f"{address}?model=llama-3.1-405b&tp=1")
    tab.wait_for_function(f"window.Bokeh && Bokeh.documents.length && {NAMED}('status')?.text.includes('expected')",
                          timeout=120_000)  # fmt: skip
    assert "weights leave room" in tab.evaluate(f"{NAMED}('status').text")


@pytest.mark.parametrize(("scheme", "width"), [("dark", 390), ("light", 1200)])
def test_it_fits_narrow_screens_and_follows_the_theme(tab: Any, address: str, scheme: str, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=scheme)
    opened(tab, address)
    answered(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    colour = tab.evaluate(model("models.find((each) => each.type === 'Figure').background_fill_color"))
    assert colour == {"light": "#ffffff", "dark": "#14171b"}[scheme]
