"""Sweeps: configurations of a scenario, simulated in independent runs; of serving, each replication and draw."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from latency_models.step_time import StepTime
from reports.fields import varying
from scenarios.fields import DRAWS, REPLICATIONS, RUNS
from scenarios.reading import Settings, in_words, with_trace
from scenarios.serving import check_scenario
from twin.executors.executor import Executor
from twin.serving.plan.plan import Draw, ServingPlan, make_plan
from twin.serving.results.report import NOTE, run_document, run_fingerprint, run_inputs
from twin.serving.results.uncertainty import combine, sensitivities, with_width
from twin.sweeps.one_run import simulate
from workloads.errors import BadInput

if TYPE_CHECKING:
    from workloads.trace import Trace

Document = dict[str, Any]


Plan = TypeVar("Plan")
AnyTask = TypeVar("AnyTask", bound=Any)
"""One run to make; its `key` is its name in a run folder."""


@dataclass(frozen=True)
class Case(Generic[Plan]):
    """One configuration: the settings that set it apart, and its plan."""

    settings: Settings
    plan: Plan


class Sweep(ABC, Generic[AnyTask]):
    """Checked configurations and their runs. Nothing is simulated until `run`."""

    @property
    @abstractmethod
    def tasks(self) -> Sequence[AnyTask]:
        """Every run, in the order in which they start."""

    @abstractmethod
    def inputs(self) -> Document:
        """The entries of a run's manifest."""

    @abstractmethod
    def fingerprint(self, version: str) -> str:
        """A digest of `version` and of everything that a result depends on."""

    @abstractmethod
    def label(self, task: AnyTask) -> str:
        """A run's configuration in words, for progress."""

    @abstractmethod
    def summarise(self, documents: dict[str, Document]) -> Document:
        """The document of the whole sweep."""

    @abstractmethod
    def work(self) -> Callable[[AnyTask], Any]:
        """The function that makes a run, perhaps in another process."""

    def keep_result(self, task: AnyTask, result: Any, folder: Path | None) -> Document:
        """The point of a run for `points.jsonl`; files of the run are written to `folder`."""
        point: Document = result
        return point

    def prepare_summary(self) -> None:
        """Compute parts of the summary that need no results, while workers simulate."""

    def run(
        self,
        documents: dict[str, Document],
        keep: Callable[[str, Document], None],
        executor: Executor,
        meanwhile: Callable[[], object] = lambda: None,
        folder: Path | None = None,
    ) -> Iterator[AnyTask]:
        """Make the missing runs; `keep` each and add it to `documents`, then yield its task."""
        missing = [task for task in self.tasks if task.key not in documents]
        with executor.each_as_done(self.work(), missing) as results:
            self.prepare_summary()
            meanwhile()
            for task, result in results:
                point = self.keep_result(task, result, folder)
                keep(task.key, point)
                documents[task.key] = point
                yield task


class TraceFiles:
    """Traces of a scenario's configurations. Each file is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._traces: dict[str, Trace | None] = {}

    def read(self, workload: Any) -> Trace | None:
        """The trace that a `workload` section names, if it names one."""
        spec = workload.trace
        key = json.dumps(None if spec is None else [spec.path, spec.format])
        if key not in self._traces:
            self._traces[key] = workload.read_trace(self._folder)
        return self._traces[key]


SWEEP_SCHEMA = "twin.serving-sweep/1"

FEWEST_DRAWS = 10
"""Student's t makes intervals of fewer draws far wider than the spread that they are of."""

SCORES = (-1.0, 1.0)
"""Scores for one-at-a-time sensitivity."""

COMPARED = ("ttft.mean", "tpot.mean", "e2e.mean", "output_throughput")
"""Metrics by which assumptions are compared."""


@dataclass(frozen=True)
class Infeasible:
    """A configuration that cannot run: the settings that set it apart, and the reason in a line."""

    settings: Settings
    reason: str


@dataclass(frozen=True)
class Task:
    """One run to make: configuration, draw of what is not known (None: the estimates), replication."""

    case: int
    draw: Draw
    replication: int
    plan: ServingPlan

    @property
    def key(self) -> str:
        draw = self.draw
        name = "-" if draw is None else f"{draw[0]}{draw[1]:+g}" if isinstance(draw, tuple) else draw
        return f"{self.case}/{name}/{self.replication}"


@dataclass(frozen=True)
class ServingSweep(Sweep[Task]):
    """Checked configurations, and the number of runs of each. Nothing is simulated until `run`.

    `draws`: of the unknowns, in the first realisation of the workload; each unknown is varied alone, too. None: as many
    as replications where there are several. `infeasible`: configurations that are known not to run.
    """

    cases: Sequence[Case[ServingPlan]]
    replications: int = 1
    draws: int | None = None
    infeasible: Sequence[Infeasible] = ()

    @property
    def tasks(self) -> list[Task]:
        return [task for index in range(len(self.cases)) for task in self.tasks_of(index)]

    def tasks_of(self, index: int) -> list[Task]:
        """The runs of one configuration: replications, draws, and each unknown alone at a score of -1 and of +1."""
        case = self.cases[index]
        draws = self.draws_of(case)
        unknowns = case.plan.unknowns() if draws else []
        varied: list[Draw] = [*range(draws), *((unknown.name, score) for unknown in unknowns for score in SCORES)]
        return [
            *(Task(index, None, replication, case.plan) for replication in range(self.replications_of(case))),
            *(Task(index, draw, 0, case.plan) for draw in varied),
        ]

    def replications_of(self, case: Case[ServingPlan]) -> int:
        """Number of replications of a configuration: one if all of them would be the same run."""
        return self.replications if case.plan.random else 1

    def draws_of(self, case: Case[ServingPlan]) -> int:
        """Number of draws of a configuration; none where the error of its step times is unknown."""
        as_replications = max(self.replications, FEWEST_DRAWS) if self.replications > 1 else 0
        draws = self.draws if self.draws is not None else as_replications
        return draws if draws and case.plan.can_draw else 0

    def fingerprint(self, version: str) -> str:
        refusals = [[refusal.settings, refusal.reason] for refusal in self.infeasible]
        more = [refusals] if refusals else []
        return run_fingerprint([case.plan for case in self.cases], version, self.replications, self.draws, *more)

    def inputs(self) -> Document:
        return run_inputs([case.plan for case in self.cases], self.replications, self.draws)

    @cached_property
    def _varying(self) -> list[str]:
        return varying([case.settings for case in self.cases])

    def label(self, task: Task) -> str:
        settings = self.cases[task.case].settings
        return ", ".join(f"{key}={settings[key]}" for key in self._varying)

    def work(self) -> Callable[[Task], Document]:
        """`run_task`, which raises an error, for a single configuration; `run_if_feasible` for several."""
        return run_task if len(self.cases) + len(self.infeasible) == 1 else run_if_feasible

    def document(self, index: int, documents: dict[str, Document]) -> Document:
        """The document `twin.simulation/1` of one configuration."""
        case = self.cases[index]
        points: dict[Draw, list[Document]] = {}
        for task in self.tasks_of(index):
            points.setdefault(task.draw, []).append(documents[task.key])
        runs, draws = points[None], [points[draw][0] for draw in range(self.draws_of(case))]
        summary, intervals = combine([run["summary"] for run in runs], [run["summary"] for run in draws])
        overloads = [run["overload"] for run in runs if run["overload"]]
        return run_document(case.plan, case.settings, runs[0]) | {
            "replications": len(runs),
            "draws": len(draws),
            "summary": summary,
            "intervals": with_width(intervals),
            "assumptions": self._assumptions(case, points),
            "saturated": 2 * len(overloads) >= len(runs),
            "overload": overloads[0] if overloads else None,
        }

    def _assumptions(self, case: Case[ServingPlan], points: dict[Draw, list[Document]]) -> list[Document]:
        """Unknowns of the configuration, by the relative deviation that each causes; the most costly first."""
        if len(points) == 1:
            return []
        varied = {
            unknown.name: tuple(points[unknown.name, score][0]["summary"] for score in SCORES)
            for unknown in case.plan.unknowns()
        }
        effects = sensitivities(points[None][0]["summary"], varied)
        described = {unknown.group: unknown for unknown in reversed(case.plan.unknowns())}
        assumptions = [
            {
                "name": name,
                "about": described[name].about,
                "basis": described[name].basis,
                "measure": described[name].measure,
                "deviation": {metric: effect.get(metric, 0.0) for metric in COMPARED},
            }
            for name, effect in effects.items()
        ]
        return sorted(assumptions, key=lambda assumption: -max(assumption["deviation"].values()))

    def summarise(self, documents: dict[str, Document]) -> Document:
        """The document `twin.serving-sweep/1`."""
        refused = {index: reason for index in range(len(self.cases)) if (reason := self.refused(index, documents))}
        if len(refused) == len(self.cases):
            raise BadInput(f"expected a configuration that can run: {refused[0]}")
        infeasible = [*self.infeasible, *(Infeasible(self.cases[i].settings, why) for i, why in refused.items())]
        return {
            "schema": SWEEP_SCHEMA,
            "name": self.cases[0].plan.scenario.name,
            "simulated": True,
            "note": NOTE,
            "points": [self.document(index, documents) for index in range(len(self.cases)) if index not in refused],
            "infeasible": [asdict(refusal) for refusal in infeasible],
        }

    def refused(self, index: int, documents: Mapping[str, Document]) -> str:
        """The reason why a configuration could not run; empty if it could."""
        reasons = (documents[task.key].get("refused", "") for task in self.tasks_of(index))
        return next(filter(None, reasons), "")


def run_task(task: Task) -> Document:
    return simulate(task.plan, task.replication, task.draw).report


def run_if_feasible(task: Task) -> Document:
    """Make one run, and report it; `refused` says why a configuration turns out not to run (too little memory)."""
    try:
        return run_task(task)
    except BadInput as error:
        return {"refused": str(error)}


def prepare(
    document: Document,
    path: Path,
    configurations: Iterable[Settings] = ({},),
    trace: Path | None = None,
    replications: int = 1,
    draws: int | None = None,
    advance: Callable[[str], object] = lambda text: None,
) -> ServingSweep:
    """Check the input of all runs. Of several configurations, those that cannot run are `infeasible`."""
    if draws and draws < FEWEST_DRAWS:
        expected = f"expected 0, or {FEWEST_DRAWS} and more: fewer do not tell how far results may be off"
        raise BadInput(expected, field="--draws", value=draws)
    for limit, flag, count in ((REPLICATIONS, "--replications", replications), (DRAWS, "--draws", draws or 0)):
        if count > limit.maximum:
            raise BadInput(limit.expectation(count), field=flag, value=count)
    configurations = list(configurations)
    if (runs := len(configurations) * (replications + (draws or 0))) > RUNS.maximum:
        raise BadInput(RUNS.expectation(runs), field="configurations x (replications + draws)", value=runs)
    document = with_trace(document, trace)
    traces = TraceFiles(path.parent)
    step_times: dict[str, StepTime] = {}
    cases: list[Case[ServingPlan]] = []
    errors: list[tuple[Settings, BadInput]] = []
    for settings in configurations:
        try:
            scenario = check_scenario(document, settings, path)
            plan = make_plan(scenario, path.parent, traces.read(scenario.workload), step_times, path)
            if draws and not plan.can_draw:
                source = scenario.step_time.name()
                expected = f"expected 0: the error of step_time.source {source} is unknown, so there is nothing to draw"
                raise BadInput(expected, field="--draws", value=draws)
            cases.append(Case(settings, plan))
        except BadInput as error:
            errors.append((settings, error))
        advance(in_words(settings))
    if not cases and errors:
        raise errors[0][1].in_file(path)
    infeasible = [Infeasible(settings, str(error)) for settings, error in errors]
    return ServingSweep(cases, replications, draws, infeasible)
