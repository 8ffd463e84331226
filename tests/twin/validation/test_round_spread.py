"""Differences between rounds of a profile and of runs after it, contention, verdicts, and intervals of forecasts."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.io.config_io import checked, write_yaml
from latency_models.sources.engine_regression import MACHINE, EngineRegression, EngineRegressionFile, Step
from latency_models.timed_runs import ProfiledRounds
from reports.blocks import Report
from reports.html import page
from reports.validation import contention_line, verdict_blocks, verdict_line
from twin.validation.compare import coverage, forecast_intervals
from twin.validation.profiling import (
    SCHEDSTAT,
    contention,
    contention_meter,
    fitted_document,
    machine_speeds,
    round_spread,
    verdict,
)

WITHIN = 0.02
PROVENANCE = {"device": "none", "model": "none"}


def steps(rng: np.random.Generator, count: int = 30) -> list[Step]:
    """Decode steps at the machine's mean speed, with a scatter of their own."""
    rows = []
    for decodes in rng.integers(1, 17, count).tolist():
        attention = 16 * decodes * int(rng.integers(1, 20))
        seconds = (5e-3 + 4e-4 * decodes + 2e-6 * attention) * float(rng.lognormal(0, WITHIN))
        rows.append(Step(decodes, attention, 0, decodes, 0, decodes, seconds))
    return rows


def rounds(rng: np.random.Generator, between: float, count: int = 20) -> list[list[Step]]:
    """A profile: each round has a speed of its own."""
    profile = []
    for _ in range(count):
        slowness = float(rng.lognormal(0, between))
        profile.append([replace(step, seconds=step.seconds * slowness) for step in steps(rng)])
    return profile


def recording(profiled: list[list[Step]]) -> ProfiledRounds:
    return ProfiledRounds([[(0.0, step) for step in of_round] for of_round in profiled])


def fitted(profiled: list[list[Step]]) -> EngineRegression:
    document = fitted_document([recording(profiled)], 16, "direct", PROVENANCE)
    return EngineRegression.from_file(checked(EngineRegressionFile, document, None))


def test_what_rounds_differ_by_is_found_although_a_fit_follows_them() -> None:
    rng = np.random.default_rng(1)
    spreads = [round_spread(rounds(rng, 0.04), 16) for _ in range(8)]
    assert np.sqrt(np.mean(np.square(spreads))) == pytest.approx(0.04, rel=0.3)
    still = [round_spread(rounds(rng, 0.0), 16) for _ in range(4)]
    assert max(still) < 0.01


def test_later_runs_lie_in_the_interval_that_the_profile_expects() -> None:
    """40 runs after each of 10 profiles, each run at a speed of its own; 90 % intervals of the unknown alone."""
    rng, inside = np.random.default_rng(2), []
    for _ in range(10):
        model = fitted(rounds(rng, 0.04))
        (machine,) = (unknown for unknown in model.unknowns() if unknown.name == "machine")
        assert machine.deviation == max(model.round_spread_, MACHINE)
        for _ in range(40):
            run = steps(rng)
            slowness = float(rng.lognormal(0, 0.04))
            total = sum(step.seconds for step in run) * slowness / float(model.predict(run).sum())
            inside.append(abs(np.log(total)) <= 1.645 * machine.deviation)
    assert 0.82 <= np.mean(inside) <= 0.96


def test_a_machine_that_held_still_is_not_expected_to_stay_so() -> None:
    model = fitted(rounds(np.random.default_rng(3), 0.0))
    (machine,) = (unknown for unknown in model.unknowns() if unknown.name == "machine")
    assert (machine.deviation, machine.basis) == (MACHINE, "assumed")


def test_a_file_of_an_earlier_version_says_nothing_of_rounds() -> None:
    document = fitted_document([recording(rounds(np.random.default_rng(4), 0.1))], 16, "direct", PROVENANCE)
    assert document["round_spread"] > 0.05
    assert "round_spread" in write_yaml(document)
    del document["round_spread"]
    model = EngineRegression.from_file(checked(EngineRegressionFile, document, None))
    assert {unknown.name: unknown.deviation for unknown in model.unknowns()}["machine"] == MACHINE


def test_a_short_profile_is_fitted_all_the_same() -> None:
    short = [of_round[:4] for of_round in rounds(np.random.default_rng(5), 0.1, count=5)]
    assert fitted(short).points_ == 16
    assert round_spread([of_round[:3] for of_round in short], 16) == 0.0


def at_speed(profiled: list[list[Step]], factor: float) -> ProfiledRounds:
    return recording([[replace(step, seconds=step.seconds * factor) for step in of_round] for of_round in profiled])


def test_the_speed_of_each_repeat_is_found() -> None:
    rng, factors = np.random.default_rng(3), [0.85, 1.0, 1.0, 1.15]
    parts = {str(i): at_speed(rounds(rng, 0.02, 8), factor) for i, factor in enumerate(factors)}
    assert list(machine_speeds(parts, 16).values()) == pytest.approx(factors, abs=0.03)


def test_a_speed_is_not_taken_for_a_property_of_the_batches_that_a_repeat_had() -> None:
    """Each repeat has numbers of decodes of its own, but for a few steps: the fit has a level for each number."""
    rng = np.random.default_rng(7)
    factors = [0.85, 1.0, 1.15]
    parts = {}
    for i, factor in enumerate(factors):
        all_rounds = rounds(rng, 0.01, 24)
        decodes = range(1 + 5 * i, 6 + 5 * i)
        kept = [[step for n, step in enumerate(row) if step.decodes in decodes or n < 4] for row in all_rounds]
        parts[str(i)] = at_speed(kept, factor)
    assert list(machine_speeds(parts, 16).values()) == pytest.approx(factors, abs=0.03)


def test_scatter_of_rounds_is_no_speed() -> None:
    """Estimates are nearer to 1 than the mean of the rounds with a repeat."""
    rng = np.random.default_rng(4)
    speeds = [machine_speeds({str(i): recording(rounds(rng, 0.1, 8)) for i in range(6)}, 16) for _ in range(6)]
    deviation = float(np.std([np.log(speed) for part in speeds for speed in part.values()]))
    assert deviation < 0.5 * 0.1 / np.sqrt(8)


def test_a_model_at_another_speed_is_longer_by_the_factor() -> None:
    model = fitted(rounds(np.random.default_rng(5), 0.0, 10))
    some = steps(np.random.default_rng(6))
    assert model.at_speed(1.3).predict(some) == pytest.approx(1.3 * model.predict(some))
    beyond = [replace(some[0], rows=5 * step.rows, decode_attention=10**6) for step in some]
    assert model.at_speed(0.5).predict(beyond) == pytest.approx(0.5 * model.predict(beyond))


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
