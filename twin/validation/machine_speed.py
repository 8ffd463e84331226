"""The optional correction for the machine's speed: the errors that remain when the speed during the run is known.

A shared machine's speed drifts by tens of per cent within seconds. Speed probes are timed between steps, while the
engine is profiled and while a workload is replayed. Step times are fitted at the machine's median speed; the corrected
prediction runs at the speed that was measured during the replay. It is no forecast: these readings exist only after the
run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from latency_models.sources.engine_regression import (
    EngineRegression,
    EngineRegressionFile,
    Step,
    read_engine_regression_file,
)
from latency_models.speed_probes import Reading
from twin.serving.machine_speed import MachineSpeed
from twin.serving.plan import ServingPlan
from twin.serving.simulation import Simulation
from twin.serving.summary import summarise
from twin.validation.backend import Backend
from twin.validation.compare import StepTimes, compare_steps
from twin.validation.recordings import ProfilingRecording, Recording
from workloads.errors import BadInput


def reference_seconds(readings: Sequence[Reading]) -> dict[int, float]:
    """Median seconds of each speed probe, by its rows."""
    sizes = sorted({rows for _, rows, _ in readings})
    return {size: float(np.median([seconds for _, rows, seconds in readings if rows == size])) for size in sizes}


def normalised_steps(part: ProfilingRecording, speed_probes: Mapping[int, float]) -> list[list[Step]]:
    """Steps of each round at the machine's reference speed; as they were timed, if the speed was not read.

    Args:
        speed_probes: seconds of each speed probe at the reference speed, by its rows.
    """
    if not speed_probes:
        return [[step for _, step in steps] for steps in part.rounds]
    speed = MachineSpeed.of(part.readings, speed_probes)

    def normalised(begin: float, step: Step) -> Step:
        return replace(step, seconds=step.seconds / speed.of_rows(step.rows).over(begin, step.seconds))

    return [[normalised(begin, step) for begin, step in steps] for steps in part.rounds]


def require_speed_probes(file: Path, backend: Backend) -> None:
    """Refuse a step-time model that was fitted without the backend's speed probes.

    Raises:
        BadInput: the file lacks the reference seconds of a probe.
    """
    if not read_engine_regression_file(file).speed_probes.keys() >= set(backend.speed_probe_rows):
        rows = ", ".join(map(str, backend.speed_probe_rows))
        expected = f"expected the seconds of probes of {rows} rows (or machine_speed: off in the scenario)"
        raise BadInput(expected, file=file, field="speed_probes")


@dataclass(frozen=True)
class Correction:
    """Predictions of a load's repeats at measured speed.

    Attributes:
        speeds: the machine's speed during each repeat.
        predicted: summaries at that speed.
        predicted_at_measured_steps: summaries with, in addition, all step times scaled to the measured total.
        steps: each measured step beside its prediction at that speed.
    """

    speeds: Sequence[MachineSpeed]
    predicted: Sequence[Mapping[str, Any]]
    predicted_at_measured_steps: Sequence[Mapping[str, Any]]
    steps: Sequence[StepTimes]

    @classmethod
    def of(cls, plan: ServingPlan, recordings: Sequence[Recording], file: EngineRegressionFile) -> Self:
        """Simulate every repeat again, at the speed that was measured.

        Args:
            plan: built on the step-time model in `file`.
        """
        model, measure = EngineRegression.from_file(file), plan.scenario.measure
        speeds = [MachineSpeed.of(recording.readings, file.speed_probes) for recording in recordings]
        steps = [StepTimes.of(each.steps, model, speed) for each, speed in zip(recordings, speeds, strict=True)]
        scaled = [speed.times_as_long(each.slowness) for speed, each in zip(speeds, steps, strict=True)]
        return cls(
            speeds,
            [summarise(Simulation(plan, i, machine_speed=speed).run(), measure) for i, speed in enumerate(speeds)],
            [summarise(Simulation(plan, i, machine_speed=speed).run(), measure) for i, speed in enumerate(scaled)],
            steps,
        )

    def errors(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """The predictions, by the name that their errors have in the document."""
        return {
            "error_at_measured_speed": self.predicted,
            "error_at_measured_steps": self.predicted_at_measured_steps,
        }

    def section(self, timeline: Mapping[str, Any]) -> dict[str, Any]:
        """The section `machine_speed` of a load; `slowdown` is relative to the reference speed.

        Args:
            timeline: the load's timeline, whose times `slowdown_over_time` follows in the first repeat.
        """
        return {
            "slowdown": [speed.means() for speed in self.speeds],
            "slowdown_over_time": {
                rows: [line.at(time) for time in timeline["time"]] for rows, line in self.speeds[0].lines.items()
            },
            "predicted": list(self.predicted),
            "steps": compare_steps(self.steps),
        }
