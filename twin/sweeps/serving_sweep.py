"""Sweeps of serving scenarios: every configuration, replication and draw, simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports.records.run_directory import fingerprint
from scenarios.limits import DRAWS, REPLICATIONS, RUNS
from scenarios.overrides import Settings, in_words
from scenarios.plugins import plugin_digest
from scenarios.reading import present_settings
from scenarios.serving import ServingScenario, check_scenario
from twin.serving.devices import cost_per_million_tokens, describe_devices
from twin.serving.plan import ServingPlan, StepTimes, describe, make_plan
from twin.serving.simulation import Run, Simulation
from twin.serving.summary import engine_summaries, link_summaries, outages, overload, summarise
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
    """Checked configurations, and the number of runs of each. Nothing is simulated until `run`.

    Attributes:
        replications: of each configuration that draws anything; one without randomness is run once.
        draws: of the step-time model, each with all replications; 0 takes its estimates.
    """

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
            for replication in range(self.replications_of(case))
        ]

    def replications_of(self, case: Case) -> int:
        """Number of replications of a configuration: one if all of them would be the same run."""
        return self.replications if case.plan.random else 1

    def fingerprint(self, version: str) -> str:
        """A digest of `version` and of everything that a result depends on."""
        identity = [
            [
                case.plan.scenario.model_dump(mode="json"),
                str(case.plan.base),
                case.plan.trace_digest,
                plugin_digest(case.plan.scenario.plugins, case.plan.base),
            ]
            for case in self.cases
        ]
        return fingerprint([version, identity, self.replications, self.draws])

    def run(
        self, done: dict[str, dict[str, Any]], keep: Callable[[str, dict[str, Any]], None], jobs: int
    ) -> Iterator[Task]:
        """Make the missing runs; `keep` each, then yield its task."""
        missing = [task for task in self.tasks if task.key not in done]
        with each_as_done(run_task, missing, jobs) as results:
            for task, point in results:
                keep(task.key, point)
                done[task.key] = point
                yield task

    def document(self, index: int, done: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The document `twin.simulation/1` of one configuration."""
        case = self.cases[index]
        replications = self.replications_of(case)
        draws = range(self.draws) if self.draws else (None,)
        points = [
            [done[Task(index, draw, replication, case.plan).key] for replication in range(replications)]
            for draw in draws
        ]
        summary, intervals = combine([[point["summary"] for point in draw] for draw in points])
        first = points[0][0]
        overloads = [point["overload"] for draw in points for point in draw if point["overload"]]
        return {
            "schema": SCHEMA,
            "name": case.plan.scenario.name,
            "simulated": True,
            "note": NOTE,
            "settings": case.settings,
            **describe(case.plan),
            "replications": replications,
            "draws": self.draws,
            "summary": summary,
            "intervals": intervals,
            "engines": first["engines"],
            "links": first["links"],
            "outages": first["outages"],
            "outside": first["outside"],
            "saturated": 2 * len(overloads) >= sum(len(draw) for draw in points) > 0,
            "overload": overloads[0] if overloads else None,
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
    """Make one run, and report it."""
    return report_run(make_run(task), task.plan)


def make_run(task: Task) -> Run:
    """Make one run."""
    return Simulation(task.plan, task.replication, task.draw).run()


def report_run(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """The report of a run, which is kept without its records."""
    summary = summarise(run, plan.scenario.measure)
    cost = cost_per_million_tokens(describe_devices(plan.pools), summary["output_throughput"])
    return {
        "summary": summary if cost is None else summary | {"cost_per_million_output_tokens": cost},
        "engines": engine_summaries(run),
        "links": link_summaries(run),
        "outages": outages(run),
        "overload": overload(run, plan),
        "outside": plan.outside(),
    }


def prepare(
    document: dict[str, Any],
    path: Path,
    configurations: Iterable[Settings] = ({},),
    trace: Path | None = None,
    replications: int = 1,
    draws: int = 0,
    advance: Callable[[str], object] = lambda text: None,
) -> ServingSweep:
    """Check the input of all runs.

    Args:
        advance: called as each configuration is ready, with its settings in words.

    Raises:
        BadInput: naming the file, field and value, when the scenario, a setting or the trace cannot be used, when draws
            are requested of step times that have no distribution, or when more runs are requested than
            `scenarios.limits` allows.
    """
    for limit, flag, count in ((REPLICATIONS, "--replications", replications), (DRAWS, "--draws", draws)):
        if count > limit.most:
            raise BadInput(limit.expectation(count), field=flag, value=count)
    configurations = list(configurations)
    if (runs := len(configurations) * replications * max(draws, 1)) > RUNS.most:
        raise BadInput(RUNS.expectation(runs), field="configurations x replications x draws", value=runs)
    if trace is not None:
        document = _with_trace(document, trace)
    traces: dict[str, Trace | None] = {}
    step_times = StepTimes(path.parent)
    cases = []
    for settings in configurations:
        scenario = check_scenario(document, settings, path)
        spec = scenario.workload.trace
        key = json.dumps(None if spec is None else [spec.path, spec.format])
        if key not in traces:
            traces[key] = scenario.workload.read_trace(path.parent)
        try:
            plan = make_plan(scenario, path.parent, traces[key], step_times)
            cases.append(Case(present_settings(ServingScenario, settings), plan))
            _check_draws(cases[-1].plan, draws)
        except BadInput as error:
            if error.file:
                raise
            raise BadInput(error.expected, value=error.value, field=error.field, file=path) from None
        advance(in_words(settings))
    return ServingSweep(cases, replications, draws)


def _check_draws(plan: ServingPlan, draws: int) -> None:
    if draws and not plan.can_draw:
        source = plan.scenario.step_time.name()
        expected = f"expected 0: step times of step_time.source {source} have no distribution to draw from"
        raise BadInput(expected, field="--draws", value=draws)


def _with_trace(document: dict[str, Any], trace: Path) -> dict[str, Any]:
    """Replace synthetic lengths by the trace."""
    lengths = ("prefill", "decode", "tasks")
    workload = {key: value for key, value in (document.get("workload") or {}).items() if key not in lengths}
    workload["trace"] = {**(workload.get("trace") or {}), "path": str(trace.absolute())}
    return {**document, "workload": workload}
