"""Time until the what-if page answers a moved slider, and the bytes and processor time of pages of runs.

    python -m benchmarks.page_speed [SCENARIO]

The slider needs Chromium and the package playwright. It is moved ten times, each after the answer before, and timed
from the change in the browser to the answer drawn there: a draft of 300 requests, and all. The processor time of a move
is that of server and worker together, up to the answer; on an idle machine an answer takes about as long, and drawing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCENARIO = "examples/roofline-h200-llama-70b.yaml"
REQUESTS = 2000
MOVES = 10
START = "import sys; from twin.cli import main; main(sys.argv[1:])"
FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update"

MOVE = """async (value) => {
  const page = Bokeh.documents[0]
  const slider = page.get_model_by_name("rate"), status = page.get_model_by_name("status")
  const begin = performance.now(), times = {}
  const answered = new Promise((done) => status.properties.text.change.connect(() => {
    if (status.text.includes("draft")) times.draft ??= performance.now() - begin
    if (status.text.includes("all")) requestAnimationFrame(() => { times.full ??= performance.now() - begin; done() })
  }))
  slider.value = value
  await answered
  return times
}"""


def pages(count: int = 2000) -> None:
    """Print bytes and processor time of the page of a sweep, and of a run."""
    from tests.browser.test_reports import many_points
    from tests.reports.rendering import page_of
    from tests.reports.serving.documents import simulation

    points = many_points(count)
    for name, make in (
        ("a run, the first page of a process", lambda: page_of(simulation())),
        ("a run", lambda: page_of(simulation())),
        (f"a sweep of {count:,} points", lambda: page_of(points)),
    ):
        begin = time.process_time()
        page = make()
        print(f"{name}: {len(page.encode()) / 1e6:.2f} MB, {time.process_time() - begin:.2f} s of processor time")


def slider(scenario: str) -> None:
    """Print the times from a moved slider to its answer."""
    from playwright.sync_api import sync_playwright

    line = ["page", scenario, "--port", "0", "--no-browser", "--set", f"workload.requests={REQUESTS}"]
    with subprocess.Popen([sys.executable, "-c", START, *line], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = re.search(r"http://\S+", server.stderr.readline())
        assert address is not None
        try:
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS.split())
                times = _moved(browser.new_page(), address[0], server.pid)
                browser.close()
        finally:
            server.send_signal(signal.SIGTERM)
    for kind in ("draft", "full", "processor time"):
        values = sorted(seconds[kind] for seconds in times)
        print(f"{kind}: median {statistics.median(values):.0f} ms, slowest {values[-1]:.0f} ms of {len(values)} moves")


def _moved(page: Any, address: str, server: int) -> list[dict[str, float]]:
    page.goto(address)
    condition = f"Bokeh.documents[0]?.get_model_by_name('status')?.text.includes('all {REQUESTS:,}')"
    page.wait_for_function(f"window.Bokeh && {condition}", timeout=60_000)
    times = []
    for move in range(MOVES):
        page.wait_for_timeout(6000)  # until the curves of the move before are done
        before = _processor_time(server)
        seconds_ = page.evaluate(MOVE, 2 + 0.24 * move)
        times.append(seconds_ | {"processor time": 1e3 * (_processor_time(server) - before)})
    return times


def _processor_time(server: int) -> float:
    """Seconds of processor time that a process and its children have taken (Linux)."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return sum(_taken(pid) for pid in [str(server), *children])


def _taken(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    pages()
    slider(sys.argv[1] if len(sys.argv) > 1 else SCENARIO)
