"""Runs a validation: profiles the engine, replays every load on it, predicts the same requests, writes the document.

The prediction is a forecast: it uses nothing that was measured after the first replay began. With
`profiling.in_turns` it uses a profile that takes turns with the replays, of other requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from latency_models.io.config_io import read_yaml
from latency_models.sources.engine_regression import EngineRegression, EngineRegressionFile, read_engine_regression_file
from reports.run_directory import RunDirectory
from scenarios.validation import ClockName, ValidationScenario
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.report import curve
from twin.serving.results.summary import RequestLatencies, Run, pooled_gaps, summarise
from twin.serving.run.simulation import Simulation, realisation, realised_sessions
from twin.sweeps.serving_sweep import prepare
from twin.validation.backend import Backend, Recording, Requests, description
from twin.validation.compare import (
    GOALS,
    compare_load,
    compare_steps,
    coverage,
    curves,
    drawn_summaries,
    fleet_summary,
    forecast_intervals,
    missed,
    refit_error,
    simulated_summary,
    summaries_of_drafts,
    summary,
    timeline,
)  # fmt: skip
from twin.validation.profiling import StepModel, contention_meter, measured_drafts
from workloads.errors import BadInput
from workloads.generator import Workload

SCHEMA = "twin.validation/2"
FITTED = "engine-steps.yaml"
FITTED_BEFOREHAND = "engine-steps-beforehand.yaml"

Note = Callable[[str], None]


class Measurements(NamedTuple):
    """The measured part of a validation; `beforehand`: the model's file as of before the first replay."""

    model: StepModel
    beforehand: Path
    drafts: Path | None
    capacity: float
    plans: dict[float, ServingPlan]
    recordings: dict[float, list[Recording]]


@dataclass(frozen=True)
class EngineValidation:
    """A validation of engines under way: every load is replayed, predicted, and compared.

    `calibration`: step times to predict with; None: profile the engine. `run` keeps each part as soon as it is over.
    """

    backend: Backend
    scenario: ValidationScenario
    base: Path
    calibration: Path | None
    run: RunDirectory
    note: Note

    def document(self) -> dict[str, Any]:
        """Profile, replay, predict and compare: the document `twin.validation/2`."""
        scenario = self.scenario
        model, beforehand, drafts, capacity, forecast, recordings = self.measure()
        plans = forecast
        steps, in_turns = beforehand, model.profiled_in_turns
        if in_turns:
            steps = model.fitted_file(FITTED, in_turns=True)
            plans = {
                load: deciding_as(plan, forecast[load]) for load, plan in self._plans(steps, drafts, capacity).items()
            }
        elif scenario.profiling.in_turns:
            self.note("too few rounds were profiled in turns with the replays: predicted by those before them")
        file = read_engine_regression_file(steps)
        speeds = model.speeds() if in_turns else {}
        loads = [
            {
                "load": load,
                "rate": load * capacity,
                **_load(
                    plan,
                    recordings[load],
                    [speeds.get(_name(load, repeat), 1.0) for repeat in range(scenario.repeats)],
                    file,
                    forecast[load] if in_turns else None,
                ),
            }
            for load, plan in plans.items()
        ]
        return {
            "schema": SCHEMA,
            "name": scenario.name,
            "note": "Measured on the live engine; predicted by simulating the same requests.",
            "clock": self._clock,
            "profiled": "in turns" if in_turns else "beforehand",
            "scenario": scenario.model_dump(mode="json", by_alias=True),
            "backend": description(self.backend, self.run),
            "calibration": read_yaml(steps),
            "capacity": capacity,
            "arriving": self._arriving,
            "errors": {
                name: {f"{load['load']:g}": load["metrics"][name]["error"] for load in loads}
                for name in loads[0]["metrics"]
            },
            "coverage": coverage(loads, list(GOALS)),
            "loads": loads,
        }

    def missed(self, document: Mapping[str, Any], tolerance: float) -> list[str]:
        """Lines for goals, times a tolerance, that the forecast misses."""
        return missed(document["loads"], tolerance)

    def measure(self) -> Measurements:
        """Profile and replay, as far as the run folder does not have it yet. Raises as `document`."""
        scenario = self.scenario
        model = StepModel(self.backend, scenario, self.base, self.calibration, self.run, self.note)
        description(self.backend, self.run)
        with blamed_on("profiling"):
            model.profile()
        beforehand = model.fitted_file(FITTED_BEFOREHAND if scenario.profiling.in_turns else FITTED)
        file = read_engine_regression_file(beforehand)
        if file.clock != self._clock:
            expected = f"expected steps timed with clock: {self._clock}"
            raise BadInput(expected, file=beforehand, field="clock", value=file.clock)
        drafts = None
        if scenario.engine.speculative_config is not None:
            if not file.largest.get("drafted"):
                expected = "expected steps with drafts, of an engine with speculative_config"
                raise BadInput(expected, file=beforehand, field="largest.drafted")
            drafts = measured_drafts(self.backend, scenario, self.base, self.run, self.note)
        capacity = _capacity(self._plan(beforehand, drafts, None))
        self.note(f"predicted capacity: {capacity:.2f} {self._arriving}/s")
        plans = self._plans(beforehand, drafts, capacity)
        return Measurements(model, beforehand, drafts, capacity, plans, self._replay_all(plans, model))

    @property
    def _clock(self) -> ClockName:
        return self.scenario.clock or "wall"

    @property
    def _arriving(self) -> str:
        return "sessions" if self.scenario.workload.get("sessions") else "requests"

    def _plans(self, steps: Path, drafts: Path | None, capacity: float) -> dict[float, ServingPlan]:
        """A plan for each load. Lower loads have fewer requests, so that all loads take equally long."""
        plans = {load: self._plan(steps, drafts, load * capacity) for load in self.scenario.loads}
        return {load: replace(plan, requests=max(round(load * plan.requests), 1)) for load, plan in plans.items()}

    def _plan(self, steps: Path, drafts: Path | None, rate: float | None) -> ServingPlan:
        frontend = read_engine_regression_file(steps).frontend
        return prepare(self.scenario.serving(steps, rate, frontend, drafts), self.base / "scenario").cases[0].plan

    def _replay_all(self, plans: Mapping[float, ServingPlan], model: StepModel) -> dict[float, list[Recording]]:
        """Replay every load in every repeat. Loads alternate, so that all meet the same drift of the machine."""
        points, repeats = self.run.points(), self.scenario.repeats
        names = {_name(load, repeat) for load in plans for repeat in range(repeats)}
        if finished := names & points.keys():
            self.note(f"resuming {self.run.path}: {len(finished)} of {len(names)} repeats have been replayed")
        for load, plan in plans.items():
            if any(_name(load, repeat) not in points for repeat in range(repeats)):
                with blamed_on("workload"):
                    warmed = self.backend.warm_up(plan.scheduler, requests_of(plan, repeats))
                if warmed:
                    self.note(f"load {load:g}: warmed up with as many requests")
        recordings: dict[float, list[Recording]] = {load: [] for load in plans}
        for repeat in range(repeats):
            for load, plan in plans.items():
                name = _name(load, repeat)
                if name in points:
                    recordings[load].append(Recording.read(self.run.path / "live" / name))
                    model.keep_in_turns(name, None)
                    continue
                recordings[load].append(self._replay(plan, repeat, name, model))
                self.note(f"repeat {repeat + 1} of {repeats}, load {load:g}: {plan.requests} requests replayed")
        return recordings

    def _replay(self, plan: ServingPlan, repeat: int, name: str, model: StepModel) -> Recording:
        scheduler = plan.scheduler
        with blamed_on("workload"), contention_meter() as measured:
            replayed = self.backend.replay(scheduler, requests_of(plan, repeat))
        recording = Recording.of(replayed, self.scenario.attention_block)
        recording.write(self.run.path / "live" / name)
        model.keep_in_turns(name, replayed.profiled)
        point = {"requests": plan.requests, "steps": len(recording.steps), "contention": measured}
        self.run.add_point(name, point)
        return recording


@contextlib.contextmanager
def blamed_on(section: str) -> Iterator[None]:
    """Turn a refusal of the live engine into an error of this section of the scenario."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(str(error), field=section) from None


def _capacity(plan: ServingPlan) -> float:
    """Predicted requests per second of an engine that always has waiting requests; of sessions, sessions per second."""
    result = summarise(Simulation(plan).run(), plan.scenario.measure)
    rate = result["request_throughput"]
    assert isinstance(rate, float)
    return rate / result["sessions"]["requests"] if "sessions" in result else rate


def deciding_as(plan: ServingPlan, live: ServingPlan) -> ServingPlan:
    """The plan with the schedulers of the live run, whose chunk policies may have used earlier step times."""
    pools = zip(plan.pools, live.pools, strict=True)
    return replace(plan, pools=[replace(pool, scheduler=engines.scheduler) for pool, engines in pools])


def requests_of(plan: ServingPlan, replication: int) -> Requests:
    """The requests of a replication, or its sessions."""
    listed = isinstance(plan.workload, Workload)
    return realisation(plan, replication) if listed else realised_sessions(plan, replication)


def _name(load: float, repeat: int) -> str:
    return f"load-{load}-repeat-{repeat + 1}"


def _load(
    plan: ServingPlan,
    recordings: Sequence[Recording],
    speeds: Sequence[float],
    file: EngineRegressionFile,
    beforehand: ServingPlan | None,
) -> dict[str, Any]:
    """The document's section of one load: metrics and steps over its repeats, curves, and a timeline of the first.

    `speeds`: factors of step times by repeat. `beforehand`: on the profile before the first replay, if `plan` is not.
    """
    models = [EngineRegression.from_file(file).at_speed(speed) for speed in speeds]
    columns, steps = [recording.columns() for recording in recordings], [recording.steps for recording in recordings]
    plans = [plan if speed == 1 else plan.with_step_time(model) for speed, model in zip(speeds, models, strict=True)]
    simulated = [Simulation(plans[i], i).run() for i in range(len(recordings))]
    measured = [
        summary(live, part.speculation) | fleet_summary(live, part.scaling, plan.scenario)
        for live, part in zip(columns, recordings, strict=True)
    ]
    predicted = [simulated_summary(plan, run) for run in simulated]
    intervals = forecast_intervals(measured, predicted, drawn_summaries(plan), summaries_of_drafts(plan))
    over_time = timeline(columns[0], simulated[0].columns)
    alternatives: dict[str, Sequence[Mapping[str, Any]]] = {}
    if beforehand is not None:
        runs = [Simulation(beforehand, i).run() for i in range(len(recordings))]
        alternatives["error_beforehand"] = [simulated_summary(beforehand, run) for run in runs]
    return {
        "requests": plan.requests,
        "metrics": {
            name: entry | intervals.get(name, {})
            for name, entry in compare_load(measured, predicted, alternatives).items()
        },
        "measured": measured,
        "predicted": predicted,
        "steps": compare_steps(steps, models) | {"refit_median": refit_error(steps, file.block_size)},
        "curves": {"live": curves(columns), "twin": _simulated_curves(plan, simulated)},
        "timeline": over_time,
        "engines": [
            {"live": live.scaling.changes, "twin": twin.scaling[0].changes}
            for live, twin in zip(recordings, simulated, strict=True)
            if live.scaling is not None and twin.scaling
        ],
        "speeds": list(speeds),
        "late": float(np.mean([recording.late for recording in recordings])),
    }


def _simulated_curves(plan: ServingPlan, runs: Sequence[Run]) -> dict[str, Any]:
    """The same quantiles as `compare.curves`, of simulated runs."""
    measure = plan.scenario.measure
    repeats = [RequestLatencies(run.columns, measure).counted() for run in runs]
    result = {name: curve(np.concatenate([values[name] for values in repeats])) for name in repeats[0]}
    gaps = [pooled_gaps(run.logs, measure) for run in runs]
    result["itl"] = curve(np.concatenate([np.repeat(values, weights) for values, weights in gaps]))
    return result
