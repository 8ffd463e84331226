"""`twin simulate`, and `twin sweep` on serving scenarios: every configuration, replication and draw, simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.records.run_directory import fingerprint
from twin.scenarios.overrides import Settings
from twin.scenarios.serving import check_scenario
from twin.serving.plan import ServingPlan, describe, make_plan
from twin.serving.run import Run, simulate
from twin.serving.summary import engine_summaries, link_summaries, summarise
from twin.serving.uncertainty import combine
from twin.sweeps.parallel import each_as_done
from workloads.errors import BadInput
from workloads.traces import Trace

SCHEMA = "twin.simulation/1"
SWEEP_SCHEMA = "twin.serving-sweep/1"
NOTE = "Simulated (discrete events, no hardware)."


@dataclass(frozen=True)
class Case:
    """One configuration: the settings that set it apart, and its plan."""

    settings: Settings
    plan: ServingPlan


@dataclass(frozen=True)
class Task:
    """One run to make: configuration, draw of the step-time model (None: its estimates), replication."""

    case: int
    draw: int | None
    replication: int
    plan: ServingPlan

    @property
    def key(self) -> str:
        """Its name in a run folder."""
        return f"{self.case}/{'-' if self.draw is None else self.draw}/{self.replication}"


@dataclass(frozen=True)
class ServingSweep:
    """Checked configurations, and how often each is run. Nothing is simulated until `run`."""

    cases: Sequence[Case]
    replications: int = 1
    draws: int = 0

    @property
    def tasks(self) -> list[Task]:
        """Every run."""
        return [
            Task(index, draw, replication, case.plan)
            for index, case in enumerate(self.cases)
            for draw in (range(self.draws) if self.draws else (None,))
            for replication in range(self.replications)
        ]

    def fingerprint(self, version: str) -> str:
        """Changes with `version` and with anything that a result depends on."""
        identity = [
            [case.plan.scenario.model_dump(mode="json"), str(case.plan.base), case.plan.trace_digest]
            for case in self.cases
        ]
        return fingerprint([version, identity, self.replications, self.draws])

    def run(
        self, done: dict[str, dict[str, Any]], keep: Callable[[str, dict[str, Any]], None], jobs: int
    ) -> Iterator[Task]:
        """Make the runs that are missing; `keep` each, then yield what it was."""
        missing = [task for task in self.tasks if task.key not in done]
        for task, point in each_as_done(run_task, missing, jobs):
            keep(task.key, point)
            done[task.key] = point
            yield task

    def document(self, index: int, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The document `twin.simulation/1` of one configuration."""
        case = self.cases[index]
        draws = range(self.draws) if self.draws else (None,)
        points = [
            [done[Task(index, draw, replication, case.plan).key] for replication in range(self.replications)]
            for draw in draws
        ]
        summary, intervals = combine([[point["summary"] for point in draw] for draw in points])
        first = points[0][0]
        return {
            "schema": SCHEMA,
            "name": case.plan.scenario.name,
            "simulated": True,
            "note": NOTE,
            "settings": case.settings,
            **describe(case.plan),
            "replications": self.replications,
            "draws": self.draws,
            "summary": summary,
            "intervals": intervals,
            "engines": first["engines"],
            "links": first["links"],
            "outside": first["outside"],
        }

    def summarise(self, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The document `twin.serving-sweep/1`."""
        return {
            "schema": SWEEP_SCHEMA,
            "name": self.cases[0].plan.scenario.name,
            "simulated": True,
            "note": NOTE,
            "points": [self.document(index, done) for index in range(len(self.cases))],
        }


def run_task(task: Task) -> dict[str, Any]:
    """One run, and what is reported of it."""
    return report_run(make_run(task), task.plan)


def make_run(task: Task) -> Run:
    """One run."""
    return simulate(task.plan, task.replication, task.draw)


def report_run(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """What is kept of a run when its records are not."""
    return {
        "summary": summarise(run, plan.scenario.measure),
        "engines": engine_summaries(run),
        "links": link_summaries(run),
        "outside": getattr(plan.step_time, "outside_", {}),
    }


def prepare(
    document: dict[str, Any],
    path: Path,
    configurations: Iterable[Settings] = ({},),
    trace: Path | None = None,
    replications: int = 1,
    draws: int = 0,
) -> ServingSweep:
    """Check everything that the runs need.

    Raises:
        BadInput: naming the file, field and value, when the scenario, a setting or the trace cannot be used.
    """
    if trace is not None:
        document = _with_trace(document, trace)
    traces: dict[str, Trace | None] = {}
    cases = []
    for settings in configurations:
        scenario = check_scenario(document, settings, path)
        spec = scenario.workload.trace
        key = json.dumps(None if spec is None else [spec.path, spec.format])
        if key not in traces:
            traces[key] = scenario.workload.read_trace(path.parent)
        try:
            cases.append(Case(settings, make_plan(scenario, path.parent, traces[key])))
        except BadInput as error:
            if error.file:
                raise
            raise BadInput(error.expected, value=error.value, field=error.field, file=path) from None
    return ServingSweep(cases, replications, draws)


def _with_trace(document: dict[str, Any], trace: Path) -> dict[str, Any]:
    """The trace takes the place of synthetic lengths."""
    lengths = ("prefill", "decode", "tasks")
    workload = {key: value for key, value in (document.get("workload") or {}).items() if key not in lengths}
    workload["trace"] = {**(workload.get("trace") or {}), "path": str(trace.absolute())}
    return {**document, "workload": workload}
