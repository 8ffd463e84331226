"""`twin watch` on pages of an engine whose truth is known: a simulated one, slower from some minute on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.io.config_io import write_yaml
from reports.calibration import watch_report
from tests.twin.recording.server import answering
from tests.twin.refinement.conftest import short_run
from twin import cli
from twin.recording.server_pages import read_scrapes
from twin.refinement import watch as watching
from twin.refinement.question import Question
from twin.refinement.watch import DAY, FALSE_ALARMS, Cusum, Windows, load_plan, page_windows, run_windows
from twin.serving.run.simulation import Simulation

SECONDS, BEGIN = 10.0, 1.7e9
SCENARIO = short_run(100, 8, (400, 0.5), (80, 0.5))


def engine(scenario: Path, slower: float, *, seed: int = 0, **settings: Any) -> Windows:
    """Windows of an engine whose steps take `slower` times as long as the scenario says."""
    question = Question(scenario, SCENARIO, {f"workload.{name}": value for name, value in settings.items()}, Path())
    plan = load_plan(question, {})
    (unknown,) = (unknown for unknown in plan.step_time.unknowns() if unknown.name == "whole_step")
    score = math.log(slower) / math.log(unknown.factor(1.0))
    plan = replace(plan.with_step_time(plan.step_time.vary({"whole_step": score})), requests=2000)
    return run_windows(Simulation(plan, 50 + seed).run(), SECONDS)


def page(windows: Windows) -> str:
    """The page that a server shows after these windows."""
    sums = {
        "inter_token_latency_seconds_sum": (windows.decoding * SECONDS).sum(),
        "inter_token_latency_seconds_count": (windows.decoding * SECONDS / np.maximum(windows.itl, 1e-9)).sum(),
        "prompt_tokens_total": windows.prompts.sum(),
        "prefix_cache_hits_total": (windows.prompts - windows.prompt_rate * SECONDS).sum(),
        "generation_tokens_total": windows.outputs.sum(),
        "request_success_total": windows.requests.sum(),
        "request_prompt_tokens_sum": windows.prompts.sum(),
        "request_prompt_tokens_count": windows.requests.sum(),
    }
    head = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="20001"} 1.0\n'
    return head + "".join(f"vllm:{name} {float(value)!r}\n" for name, value in sums.items())


def write_scenario(folder: Path) -> Path:
    (folder / "scenario.yaml").write_text(write_yaml(SCENARIO))
    return folder / "scenario.yaml"


def write_pages(folder: Path, windows: Windows) -> Path:
    folder.mkdir()
    for i in range(len(windows) + 1):
        text = page(windows.where(np.arange(len(windows)) < i))
        (folder / f"metrics-{BEGIN + i * SECONDS:.3f}.prom").write_text(text)
    return folder


@pytest.fixture(autouse=True, scope="module")
def few_windows() -> Iterator[None]:
    """Simulate a short time at each load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "WINDOWS", 12)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario, and pages of two engines 10 % slower than it; `drifted` becomes another 5 % slower after 15 windows,
    and the requests of `longer` have twice the prompts then."""
    folder = tmp_path_factory.mktemp("watch")
    scenario = write_scenario(folder)
    steady = engine(scenario, 1.1)
    first = steady.where(np.arange(15))
    write_pages(folder / "steady", steady)
    write_pages(folder / "drifted", Windows.joined([first, engine(scenario, 1.1 * 1.05, seed=1)]))
    longer = {"prefill.mean": 800, "decode.mean": 160, "arrivals.rate": 4}
    write_pages(folder / "longer", Windows.joined([first, engine(scenario, 1.25, seed=2, **longer)]))
    return folder


def watch(folder: Path, pages: str, *words: str, learn: float = 10 * SECONDS) -> int:
    flags = ["--window", str(SECONDS), "--learn", str(learn), *words]
    return cli.run(["watch", str(folder / "scenario.yaml"), "--pages", str(folder / pages), *flags])


def test_pages_give_the_windows_back_but_those_without_answers_or_with_a_restart(tmp_path: Path) -> None:
    windows = engine(write_scenario(tmp_path), 1.0).where(np.arange(6))
    write_pages(tmp_path / "pages", windows)
    pages = read_scrapes(tmp_path / "pages")
    found = page_windows(pages, SECONDS)
    for field in fields(Windows):
        if field.name not in ("start", "end"):
            np.testing.assert_allclose(getattr(found, field.name), getattr(windows, field.name), rtol=1e-6)
    assert (found.end - BEGIN).tolist() == [10, 20, 30, 40, 50, 60]
    idle = replace(pages[3], at=pages[3].at + 5)
    later = [replace(page, values=pages[i].values, at=page.at + 10) for i, page in enumerate(pages[4:])]
    restarted = [*pages[:4], idle, *later]
    assert (page_windows(restarted, 5.0).end - BEGIN).tolist() == [10, 20, 30, 60, 70]
    assert (page_windows(pages, 25.0).end - BEGIN).tolist() == [30, 60]


def test_an_engine_that_stays_as_it_was_raises_no_alarm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(folder, "steady", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["learned"]) == ("as predicted", 10)
    assert document["offset"] == pytest.approx(0.1, abs=0.015)
    assert 0.0 < document["minutes_to_find"] < 10.0
    assert "no drift of 5 % since" in str(watch_report(document))


def test_a_drift_is_found_with_its_begin_and_size_and_step_times_are_refined(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refined = folder / "refined.yaml"
    assert watch(folder, "drifted", "--json", "--refined", str(refined), "--factors", "whole_step") == 4
    document = json.loads(capsys.readouterr().out)
    alarm = document["alarm"]
    assert alarm["cause"] == "engine"
    assert abs(alarm["since"] - (BEGIN + 15 * SECONDS)) <= 2 * SECONDS
    assert alarm["found"] - alarm["since"] < 600
    low, high = alarm["interval"]
    assert low < 0.05 < high
    assert "whole_step" in refined.read_text()
    # Without learning the scenario's own error of 10 % is a drift from the beginning.
    assert watch(folder, "steady", "--json", learn=0) == 4
    assert json.loads(capsys.readouterr().out)["alarm"]["since"] == BEGIN


def test_longer_requests_are_named_as_the_cause(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refined = folder / "not.yaml"
    assert watch(folder, "longer", "--refined", str(refined)) == 4  # the scenario has other requests
    captured = capsys.readouterr()
    assert "lengths of requests changed, too" in " ".join(captured.out.split())
    assert "step times are not refined" in captured.err
    assert not refined.exists()


def test_too_few_pages_are_no_verdict(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for file in sorted((folder / "steady").iterdir())[:3]:
        (few / file.name).write_text(file.read_text())
    assert cli.run(["watch", str(folder / "scenario.yaml"), "--pages", str(few), "--window", str(SECONDS)]) == 5
    assert "undecided: 3 pages have 2 windows" in " ".join(capsys.readouterr().out.split())


def test_pages_of_a_server_are_added(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal) -> None:
    pages = tmp_path / "pages"
    words = ["watch", str(folder / "scenario.yaml"), "--pages", str(pages)]
    with answering() as (port, _):
        url = f"http://127.0.0.1:{port}"
        assert cli.run([*words, "--once", "--metrics", url]) == 5  # one page has no window
        short = [*words, "--once", "--metrics", url, "--window", "0.001"]
        assert "expected vllm:inter_token_latency_seconds" in refusal(*short)
    assert len(list(pages.iterdir())) == 2
    nobody = ["--once", "--metrics", "http://127.0.0.1:9"]
    assert cli.run([*words, *nobody]) == 1
    assert "does not answer /metrics" in capsys.readouterr().err
    assert "--pages: got" in refusal(*words[:-1], folder / "scenario.yaml", *nobody)
    assert "expected a file, found a folder" in refusal(*words, "--refined", str(pages))
    assert "--metrics" in refusal(*words, "--once")


@pytest.mark.parametrize("shift", [1.0, 4.0])
def test_thresholds_give_the_false_alarms_that_are_allowed(shift: float) -> None:
    """Siegmund's formula against drawn scores."""
    a_day = 20
    test = Cusum(shift, DAY / a_day, 0)
    scores, first, alarms = np.random.default_rng(3).standard_normal(60_000), 0, 0
    while (found := test.run(scores[first:])) is not None:
        first, alarms = first + found[1] + 1, alarms + 1
    expected = a_day / FALSE_ALARMS
    assert 0.6 * expected < len(scores) / alarms < 1.7 * expected
    shifted = [test.run(np.random.default_rng(i).standard_normal(500) + shift) for i in range(200)]
    delays = [found[1] + 1 for found in shifted if found is not None]
    assert np.mean(delays) == pytest.approx(test.delay, abs=1.0)
