"""Measures the points of a grid, round after round, and records each measurement in a journal."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.microbenchmark import COLD_BYTES, Case, Timing, measure
from latency_models.deployment.models import Model
from live.calibration.communication import round_trips
from live.calibration.grid import Grid, Point, line
from live.calibration.journal import Journal
from live.calibration.operations import Bench, case_of, missing, shape_of, step_case, step_point
from live.device import device_name, versions

Measure = Callable[[Case], Timing]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCHEMA = "twin.calibration-journal/1"

MAX_SAMPLES = 100
"""Samples of a point in a round; calls of a few microseconds reach this number within the budget."""

MORE_ROUNDS, AGREES = 4, 0.02
"""Maximum number of further rounds, and the relative difference of the two shortest that makes them unnecessary."""


@dataclass(frozen=True)
class Plan:
    """The model, the points and the device of a calibration. `groups`: the selected ones of `grid.GROUPS`."""

    model: Model
    device: str
    dtype: str
    grid: Grid
    groups: Sequence[str]
    epsilon: float = 1e-5

    def points(self) -> tuple[list[Point], dict[str, str]]:
        """The points that can be measured, and by name the operations that cannot, each with the reason."""
        shape = shape_of(self.model)
        everything = self.grid.points(self.groups)
        names = dict.fromkeys(point.operation for point in everything)
        skipped = {name: why for name in names if (why := missing(name, shape))}
        for group, note in (("communication", "only with --ops communication"), ("overhead", "left out by --ops")):
            if group not in self.groups:
                skipped[group] = note
        points = [point for point in everything if point.operation not in skipped]
        if "overhead" in self.groups:
            points += [step_point(*sizes) for sizes in self.grid.steps]
        return points, skipped

    def messages(self) -> list[Point]:
        """The points of messages between two processes; none unless selected."""
        if "communication" not in self.groups:
            return []
        grid = self.grid
        return list(line(["round_trip"], "requests", grid.requests, grid.held_requests))

    def about(self) -> dict[str, Any]:
        """The description that two runs must share for one to continue the other."""
        description = {
            "schema": SCHEMA,
            "device": device_name(self.device),
            "model": self.model.model_dump(mode="json", by_alias=True),
            "dtype": self.dtype,
            "grid": dataclasses.asdict(self.grid),
            "versions": versions(),
        }
        about: dict[str, Any] = json.loads(json.dumps(description))
        return about


def count(plan: Plan) -> int:
    """The minimum number of measurements of a run."""
    points, _ = plan.points()
    return plan.grid.rounds * (len(points) + len(plan.messages()))


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
            points = [point for point in points if not settled(rounds_of(journal, point, number))]
        for point in random.Random(number).sample(points, len(points)):
            key = f"{number} {point.key}"
            if key in journal:
                continue
            make = step_case if point.operation == "whole_step" else case_of
            timing = (timer or by_clock)(make(point, bench))
            journal.add(key, seconds=timing.seconds, spread=timing.spread, samples=timing.samples)
            advance(point.key)
        if number < plan.grid.rounds:
            _measure_messages(plan, journal, advance, number, bench.shape.hidden * dtype.itemsize)


def rounds_of(journal: Journal, point: Point, before: int) -> list[float]:
    """Seconds of a point in the rounds before round `before` that measured it."""
    keys = [f"{number} {point.key}" for number in range(before)]
    return [journal[key]["seconds"] for key in keys if key in journal]


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


def today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
