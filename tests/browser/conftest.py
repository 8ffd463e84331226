"""A real browser, Chromium, in which nothing may be asked of another machine. Without one, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"
)
LOCAL_SCHEMES = ("file", "data", "blob")


@pytest.fixture(scope="module")  # while the driver runs, no other test may start an event loop
def chromium() -> Iterator[Any]:
    """The running browser."""
    result = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if result is None:
        pytest.skip("needs Chromium, which is not installed here")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=result, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[Any]:
    """An empty tab. Fails at the end if a script failed, or if anything was asked of another machine."""
    context = chromium.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    page = context.new_page()
    urls: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    parts = [urlsplit(url) for url in urls]
    assert [part.geturl() for part in parts if part.scheme not in LOCAL_SCHEMES and part.hostname != "127.0.0.1"] == []
    assert errors == []


READY = "window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"


def opened(tab: Any, address: str) -> None:
    """Open a page and wait until its charts are drawn."""
    tab.goto(address)
    tab.wait_for_function(READY, timeout=60_000)


def model(expression: str) -> str:
    """JavaScript that evaluates an expression over `models`, all models of the page's document."""
    return f"() => {{ const models = [...Bokeh.documents[0]._all_models.values()]; return {expression} }}"
