"""How often `twin watch` raises a false alarm, and how soon it finds a planted drift, on simulated series of pages.

    python -m benchmarks.watch [--days 300] [--drifts 100] [--scenario examples/roofline-h200-llama-70b.yaml]

An engine is simulated at four loads, with steps 5 % slower than the scenario's, and a server's noise of 1 % is added
to each window. Hours of it, of random loads, make days, in which false alarms are counted. In other series steps become
5 % slower again after 30 minutes, and the minutes until that is found are counted.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from scenarios.reading import read_scenario
from twin.refinement.question import Question
from twin.refinement.watch import DAY, DriftTest, LoadCurve, WatchOptions, Windows, load_plan, run_windows
from twin.serving.run.simulation import Simulation

WRONG, DRIFT, NOISE = 1.05, 1.05, 0.01
"""Step times over those of the scenario from the beginning, and over those later; deviation of a window's noise."""

LOADS, HOURS, BEGIN = (0.4, 0.7, 1.0, 1.3), 6, 30
"""Multiples of the scenario's rate; hours simulated at each; windows before the drift begins."""


def engine_windows(question: Question, curve: LoadCurve, rate: float, seconds: float, factor: float) -> list[Windows]:
    """Windows of an engine whose steps take `factor` times the scenario's, hours of each load."""
    parts = []
    for i, load in enumerate(LOADS):
        plan = load_plan(question, curve.settings_at(load * rate))
        unknown = next(unknown for unknown in plan.step_time.unknowns() if unknown.name == "whole_step")
        slow = plan.with_step_time(
            plan.step_time.vary({"whole_step": math.log(factor) / math.log(unknown.factor(1.0))})
        )
        requests = round(load * rate * HOURS * 3600)
        parts.append(run_windows(Simulation(replace(slow, requests=requests), 7 + i).run(), seconds))
    return parts


def hour(parts: list[Windows], length: int, random: np.random.Generator) -> Windows:
    """Successive windows of one load, with the noise of a server."""
    part = parts[random.integers(len(parts))]
    first = int(random.integers(len(part) - length))
    windows = part.where(np.arange(first, first + length))
    noise = np.exp(NOISE * random.standard_normal(length))
    return replace(windows, itl=windows.itl * noise, decoding=windows.decoding * noise)


def alarm(curve: LoadCurve, options: WatchOptions, windows: Windows) -> int | None:
    """The window that raises the alarm, counted from the first; None without one."""
    learned = round(options.learn / options.window)
    excess = curve.excess(windows)
    test = DriftTest(excess[:learned], curve.deviation, options)
    found = test.run(excess[learned:] - test.offset)
    return None if found is None else learned + found[1]


def main() -> None:
    """Print false alarms a day and minutes until a drift is found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenario", type=Path, default=Path("examples/roofline-h200-llama-70b.yaml"))
    parser.add_argument("--days", type=int, default=300)
    parser.add_argument("--drifts", type=int, default=300)
    arguments = parser.parse_args()
    path: Path = arguments.scenario
    options, random = WatchOptions(), np.random.default_rng(20261126)
    question = Question(path, read_scenario(path, "serving"), {}, Path())
    rate = float(question.document["workload"]["arrivals"]["rate"])
    curve = LoadCurve(question, (min(LOADS) * rate, max(LOADS) * rate), options.window, lambda text: None)
    before = engine_windows(question, curve, rate, options.window, WRONG)
    after = engine_windows(question, curve, rate, options.window, WRONG * DRIFT)
    per_hour, hours = round(3600 / options.window), round(DAY / 3600)
    alarms = sum(
        alarm(curve, options, Windows.joined([hour(before, per_hour, random) for _ in range(hours)])) is not None
        for _ in range(arguments.days)
    )
    delays, early = [], 0
    for _ in range(arguments.drifts):
        series = Windows.joined([hour(before, BEGIN, random), hour(after, per_hour, random)])
        found = alarm(curve, options, series)
        if found is None or found < BEGIN:
            early += 1
        else:
            delays.append((found - BEGIN + 1) * options.window / 60)
    document = {
        "scenario": str(path), "simulated": True, "deviation_of_a_window": curve.deviation,
        "false_alarms_per_day": alarms / arguments.days, "days": arguments.days,
        "drifts": arguments.drifts, "found_within_10_minutes": sum(d <= 10 for d in delays) / arguments.drifts,
        "minutes_median": float(np.median(delays)), "minutes_p95": float(np.quantile(delays, 0.95)),
        "not_found_or_early": early,
    }  # fmt: skip
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
