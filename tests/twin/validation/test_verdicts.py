"""Contention leaves missed goals undecided, and intervals of forecasts count what they contain."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports.blocks import Report
from reports.html import page
from reports.validation import contention_line, verdict_blocks, verdict_line
from twin.validation.compare import coverage, forecast_intervals
from twin.validation.profiling import SCHEDSTAT, contention, contention_meter, verdict

QUIET = {
    "cpu_seconds": 10.0, "wall_seconds": 10.1, "involuntary_switches": 30.0, "waited_seconds": 0.02,
    "equal_work_seconds": 1e-3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"waited_seconds": 1.0}, "waited for a processor 4.9 %"),
        ({"involuntary_switches": 900.0}, "interrupted 46 times a second"),
        ({"equal_work_seconds": 1.08e-3}, "equal work differed by 8 %"),
    ],
)
def test_missed_goals_are_undecided_on_a_contended_machine(change: dict[str, float], reason: str | None) -> None:
    result = contention([{"contention": QUIET}, {}, {"contention": QUIET | change}])
    assert (result["parts"], result["contended"]) == (2, reason is not None)
    assert verdict([], result) == "met"
    assert verdict(["a goal"], result) == ("missed" if reason is None else "undecided")
    document: dict[str, Any] = {"missed": ["TTFT < MEAN"], "contention": result, "verdict": verdict(["a goal"], result)}
    sentence = verdict_line(document)
    line = contention_line(result)
    html = page(Report("a validation", verdict_blocks(document, "forecast")), {})
    assert "<li>TTFT &lt; MEAN</li>" in html
    if reason is None:
        assert sentence == "Verdict: 1 goal missed."
        assert line.endswith("(not contended)")
    else:
        assert reason in sentence
        assert "undecided" in html
        assert line.endswith("(contended)")


def test_the_energy_of_replays_is_that_of_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, energy in (("intel-rapl:0", 5_000_000), ("intel-rapl:1", 7_000_000), ("intel-rapl:0:0", 3_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{energy}\n")
    monkeypatch.setattr("twin.validation.profiling.PACKAGES", tmp_path)
    points: list[dict[str, Any]] = []
    for entry in ({"rounds": 2}, {"requests": 10}):
        with contention_meter() as measured:
            (tmp_path / "intel-rapl:1" / "energy_uj").write_text(f"{9_500_000 * (1 + len(points))}\n")
        points.append(entry | {"contention": measured})
    assert contention(points)["package_joules"] == pytest.approx(9.5)
    assert "drew 10 J" in contention_line(contention(points))
    points[1]["contention"]["package_joules"] = -262.0  # wrapped
    assert contention(points)["package_joules"] is None


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the run queue's times are Linux's")
def test_a_rival_on_the_same_processor_is_noticed() -> None:
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})  # children have it too
    try:
        rivals = [multiprocessing.get_context("fork").Process(target=spin, args=(0.6,)) for _ in range(2)]
        for process in rivals:
            process.start()
        with contention_meter() as measured:
            spin(0.4)
        for process in rivals:
            process.join()
    finally:
        os.sched_setaffinity(0, processors)
    result = contention([{"contention": measured}])
    assert result["contended"]
    assert result["waited_share"] > 0.3


def summaries(values: list[float]) -> list[dict[str, object]]:
    return [{"ttft": {"mean": value}, "output_throughput": 100.0} for value in values]


def test_measured_values_are_counted_around_the_forecasts_of_their_own_requests() -> None:
    """Repeats differ by 30 %, the model by 2 %: only the second measured value is outside, though near the others."""
    predicted, measured = summaries([1.0, 1.3, 1.6]), summaries([1.01, 1.0, 1.62])
    draws = summaries(np.exp(0.02 * np.random.default_rng(0).standard_normal(10)).tolist())
    entry = forecast_intervals(measured, predicted, draws)["ttft.mean"]
    assert entry["inside"] == 2
    assert entry["parts"]["model"] == pytest.approx(0.02, rel=0.5)
    assert entry["parts"]["sampling"] == pytest.approx(np.log([1.0, 1.3, 1.6]).std(ddof=1))
    low, high = entry["forecast_interval"]
    assert low < 1.0 < 1.6 < high


def test_without_draws_the_models_part_is_unknown() -> None:
    intervals = forecast_intervals(summaries([1.0, 1.1]), summaries([1.0, 1.2]), [])
    assert intervals["ttft.mean"]["inside"] is None
    assert intervals["ttft.mean"]["parts"]["model"] is None
    assert coverage([{"metrics": intervals, "measured": [1, 2]}], ["ttft.mean"]) is None


def test_coverage_is_over_loads_and_repeats() -> None:
    loads = [
        {"metrics": {"ttft.mean": {"inside": 2}, "tpot.mean": {"inside": None}}, "measured": [0, 0, 0]},
        {"metrics": {"ttft.mean": {"inside": 1}}, "measured": [0, 0]},
    ]
    assert coverage(loads, ["ttft.mean", "tpot.mean", "e2e.mean"]) == {"inside": 3, "values": 5}
