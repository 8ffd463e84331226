"""`twin calibrate run` without its command line: measures what a plan says, round after round, and writes the file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from kernels.microbenchmark import COLD_BYTES, Case, Timing, measure
from latency_models.io.config_io import write_yaml
from latency_models.sources.calibration_file import MeasuredCalibration
from live.calibration.assembling import assemble, pictures
from live.calibration.communication import measure_link, round_trips
from live.calibration.operations import Bench, case_of, shape_of
from live.calibration.plan import DTYPES, MORE_ROUNDS, Journal, Plan, make_plan
from live.device import keep_freed_memory, use_huge_pages
from live.device import use_threads as set_threads
from reports.run_directory import write_text

__all__ = ["calibrate", "link_of", "make_plan", "open_journal", "pictures", "use_threads"]

Measure = Callable[[Case], Timing]

MAX_SAMPLES = 100
"""Samples of a point in a round; calls of a few microseconds reach this number within the budget."""

AGREES = 0.02
"""The relative difference of the two shortest rounds that makes further ones unnecessary."""


def use_threads(device: str, threads: int | None) -> None:
    """Set the CPU threads that PyTorch uses (default 1: its processor time excludes other programs)."""
    if device == "cpu":
        set_threads(1 if threads is None else threads, "--threads")
        keep_freed_memory()
        use_huge_pages()


def journal_of(output: Path) -> Path:
    return output.with_name(output.name + ".measurements.jsonl")


def open_journal(plan: Plan, output: Path, *, fresh: bool = False) -> Journal:
    """The measurements that exist for this plan and this file. The file's folder is made if needed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return Journal(journal_of(output), plan.about(), fresh=fresh)


def link_of(output: Path) -> Path:
    return output.with_name(f"{output.stem}.link.yaml")


def calibrate(
    plan: Plan, journal: Journal, output: Path, advance: Callable[[str], None], timer: Measure | None = None
) -> MeasuredCalibration:
    """Measure what the journal does not have, and write the file. With communication on a CPU, also the link file."""
    measure_all(plan, journal, advance, timer)
    if "communication" in plan.groups and plan.device == "cpu":
        link = measure_link(journal, plan.grid.rounds, quick=plan.quick, advance=advance)
        write_text(link_of(output), write_yaml(link.model_dump(mode="json", by_alias=True)))
    calibration = assemble(plan, journal, output.stem)
    write_text(output, calibration.to_yaml())
    return calibration


def measure_all(plan: Plan, journal: Journal, advance: Callable[[str], None], timer: Measure | None = None) -> None:
    """Measure every point in every round, except those that the journal already has.

    Each round has its own random order, so that drift during a round does not look like a dependence on size. With the
    statistic `least`, points whose two shortest rounds differ get up to MORE_ROUNDS further rounds.
    """
    dtype = DTYPES[plan.dtype]
    bench = Bench(shape_of(plan.model, plan.epsilon), plan.device, dtype)
    weights = int(plan.model.parameters * dtype.itemsize)
    points, _ = plan.points()

    def by_clock(case: Case) -> Timing:
        # Between two uses of an input, a step reads the model's weights and other layers' inputs of this kind.
        cold = min(COLD_BYTES[plan.device], max(weights, (plan.model.layers - 1) * case.set_bytes))
        return measure(case, plan.device, budget=plan.grid.budget, samples=MAX_SAMPLES, cold=cold)

    extra_rounds = MORE_ROUNDS if plan.grid.statistic == "least" else 0
    for number in range(plan.grid.rounds + extra_rounds):
        if number >= plan.grid.rounds:
            points = [point for point in points if not settled(journal.rounds(point, number))]
        for point in random.Random(number).sample(points, len(points)):
            key = f"{number} {point.key}"
            if key in journal:
                continue
            timing = (timer or by_clock)(case_of(point, bench))
            journal.add(key, seconds=timing.seconds, spread=timing.spread, samples=timing.samples)
            advance(point.key)
        if number < plan.grid.rounds:
            _measure_messages(plan, journal, advance, number, bench.shape.hidden * dtype.itemsize)


def settled(rounds: Sequence[float]) -> bool:
    """True if the two shortest rounds agree, so that the shortest is no outlier."""
    shortest, second = sorted(rounds)[:2]
    return second <= shortest * (1 + AGREES)


def _measure_messages(
    plan: Plan, journal: Journal, advance: Callable[[str], None], number: int, row_bytes: int
) -> None:
    points = [point for point in plan.messages() if f"{number} {point.key}" not in journal]
    if not points:
        return
    for point, seconds in zip(points, round_trips([point["requests"] for point in points], row_bytes), strict=True):
        journal.add(f"{number} {point.key}", seconds=seconds, spread=0.0, samples=1)
        advance(point.key)
