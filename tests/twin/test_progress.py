"""Progress is shown while a command is busy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latency_models.sources.linear import LinearSpec
from tests.twin.serving.scenarios import scenario
from twin.cli import console, run
from twin.sweeps import serving_sweep


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("twin: ") for line in capsys.readouterr().err.splitlines()]


def test_a_log_gets_a_line_for_every_tenth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Clock(monkeypatch)
    with console.progress("simulating", 405, 0) as advance:
        for i in range(405):
            advance(f"point {i}")
    counts = [int(line.split("[")[1].split("/")[0]) for line in lines(capsys)]
    assert counts == [40, 80, 120, 160, 200, 240, 280, 320, 360, 400, 405]


def test_long_steps_get_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with console.progress("simulating", 1000, 0) as advance:
        for _ in range(9):
            clock.now += 12
            advance("")
    assert lines(capsys) == [
        "simulating [3/1000, 3.3 h left]", "simulating [6/1000, 3.3 h left]", "simulating [9/1000, 3.3 h left]"
    ]  # fmt: skip


def test_work_of_unknown_length_says_a_bound_or_its_own_duration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, bounds = Clock(monkeypatch), [10_000, 90, 20]
    with console.progress("simulating", None, 0, remaining=lambda: bounds.pop(0)) as advance:
        for _ in range(30):
            clock.now += 3
            advance("")
    assert lines(capsys) == [
        "simulating [10 of at most 10010]",  # days by this bound, which will not be so bad
        "simulating [20 of at most 110, at most 4 min left]", "simulating [30 of at most 50, at most 60 s left]",
    ]  # fmt: skip
    with console.progress("refining", None, 0, patience=2) as advance:
        clock.now += 100
        advance("drawing")
    assert lines(capsys) == ["refining [1, 2 min] drawing"]


def test_what_is_over_in_a_moment_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with console.progress("preparing", 3, 0, patience=2) as advance:
        for _ in range(3):
            clock.now += 0.5
            advance("")
    assert lines(capsys) == []
    with console.progress("preparing", 20, 0, patience=2) as advance:
        for _ in range(10):
            clock.now += 0.5
            advance("")
    assert lines(capsys) == [
        "preparing [4/20, 8 s left]", "preparing [6/20, 7 s left]", "preparing [8/20, 6 s left]",
        "preparing [10/20, 5 s left]",
    ]  # fmt: skip


def test_a_sweep_prepares_aloud_and_reads_its_step_times_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Path] = []
    build = LinearSpec.build

    def counted(self: LinearSpec, base: Path) -> object:
        built.append(base)
        return build(self, base)

    monkeypatch.setattr(LinearSpec, "build", counted)
    lines: list[str] = []
    settings = [{"workload.arrivals.rate": rate} for rate in range(1, 6)]
    sweep = serving_sweep.prepare(scenario(), tmp_path / "s.yaml", settings, advance=lines.append)
    assert lines == [f"workload.arrivals.rate={rate}" for rate in range(1, 6)]
    assert len(built) == 1
    assert len({id(case.plan.step_time) for case in sweep.cases}) == 1
    plan = sweep.cases[0].plan
    assert plan.for_one_run().step_time is not plan.step_time  # each run has a record of its own
    settings = [{"step_time.overhead": seconds} for seconds in (0.001, 0.002)]
    sweep = serving_sweep.prepare(scenario(), tmp_path / "s.yaml", settings)
    assert [case.plan.step_time.overhead for case in sweep.cases] == [0.001, 0.002]  # type: ignore[attr-defined]


def test_an_interrupted_preparation_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(json.dumps(scenario()))
    monkeypatch.setattr(serving_sweep, "make_plan", interrupt)
    assert run(["sweep", "s.yaml", "--set", "workload.arrivals.rate=1,2"]) == 130
    assert capsys.readouterr().err == "twin: interrupted; nothing was finished that could be kept\n"
    assert not (tmp_path / "runs").exists()
