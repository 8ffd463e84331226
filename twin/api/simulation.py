"""`twin.simulate`: one serving system, simulated, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scenarios.serving import ServingScenario
from twin.api.arguments import Overrides, check_counts, errors_name_arguments, path_of
from twin.api.run_folder import complete, new_run
from twin.api.scenario import Scenario, opened
from twin.executors import processes
from twin.executors.executor import Executor, ExecutorChoice, choose_executor
from twin.serving.results.reference_run import compare, read_reference_run
from twin.serving.results.timeseries import timeseries
from twin.sweeps.one_run import make_run
from twin.sweeps.serving_sweep import ServingSweep, Task, prepare, report_run
from workloads.errors import BadInput
from workloads.generator import Workload

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from reports.records.run_directory import RunDirectory
    from twin.serving.run.simulation import Run

Document = dict[str, Any]

REQUESTS = "requests.parquet"
"""The file of a run folder with a row for each request of the first run."""


@dataclass(frozen=True)
class Result:
    """Results of a simulated serving system. DataFrames are made when they are first read.

    With several replications or draws, `summary` and `document` are of all of them; requests, steps, engines and time
    series are of the first. Columns and units stand in docs/reference/python.md.

    Attributes:
        scenario: the simulated scenario.
        document: everything that is reported, as `twin simulate --json` prints it (schema `twin.simulation/1`).
        points: reports of the runs after the first, by key.
    """

    scenario: Scenario
    document: Document
    points: dict[str, Document]
    _sweep: ServingSweep
    _first: Run

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for each metric (`ttft.p99`, `output_throughput`): value, unit, and, of several runs, intervals."""
        from twin.api.frames import summary_frame

        return summary_frame(self.document)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row for each request of the first run, in the order in which they finished; times in seconds.

        A run with `detail: false` has fewer columns.
        """
        from twin.api.frames import requests_frame

        return requests_frame(self._first, self._spec.measure)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row for each engine step of the first run, fast-forwarded steps included; times in seconds.

        Raises:
            BadInput: the scenario lacks `detail: true`.
        """
        from twin.api.frames import steps_frame

        self._require_detail()
        return steps_frame(self._first.logs)

    @cached_property
    def engines(self) -> pd.DataFrame:
        """One row for each engine of the first run: utilisation, steps, tokens and preemptions."""
        import pandas as pd

        return pd.DataFrame(self.document["engines"])

    @cached_property
    def timeseries(self) -> pd.DataFrame:
        """Running and waiting requests and KV blocks in use over all engines, at evenly spaced times (seconds).

        Of an autoscaled run also the engines in each state.

        Raises:
            BadInput: the scenario lacks `detail: true`.
        """
        import pandas as pd

        self._require_detail()
        series = self.document["series"]
        columns = {name: series[name] for name in ("time", "running", "waiting", "kv_used")}
        return pd.DataFrame(columns | series.get("engines", {}))

    def plot(self, kind: str = "latencies") -> Figure:
        """A matplotlib figure: `latencies` (their distributions) or `over-time` (requests and KV blocks over time).

        Raises:
            BadInput: there is no such figure, or the scenario lacks `detail: true`.
        """
        from twin.api.drawing import figure

        self._require_detail()
        return figure(self.document, kind)

    def save(self, folder: str | Path, *, figures: bool = True, events: bool = False) -> Path:
        """Write a run folder like that of `twin simulate`; returns its path.

        Args:
            folder: made if it is not there.
            figures: write figures and the HTML report.
            events: write `trace-events.json.gz` too, for Perfetto. Only for runs with detail.

        Raises:
            BadInput: the folder is not empty.
            OSError: it cannot be written.
        """
        inputs = self._sweep.inputs()
        with new_run(folder, self.scenario.path, inputs, "twin.simulate(…).save(…)") as run:
            for key, point in self.points.items():
                run.add_point(key, point)
            self.write(run, figures=figures, events=events)
        return run.path

    def write(self, run: RunDirectory, *, figures: bool, events: bool) -> Document:
        """Write requests, summary, figures and page into a run folder, which is complete then; returns the summary."""
        if self._spec.detail:
            if self._first.columns.sink is None:
                from reports.records.columns import write_columns

                write_columns(run.path / REQUESTS, self._first.request_table())
            if events and self._spec.detail is True:
                from reports.serving.trace_events import write_trace_events

                write_trace_events(run.path / "trace-events.json.gz", self._first.logs, self._first.columns)
        return complete(run, self.document, figures=figures)

    def _repr_html_(self) -> str:
        """The headline and the summary, for notebooks."""
        from html import escape

        from reports.serving.sentences import headline

        html: str = self.summary.to_html(na_rep="–")
        return f"<p>{escape(headline(self.document))}</p>{html}"

    @property
    def _spec(self) -> ServingScenario:
        return self._sweep.cases[0].plan.scenario

    def _require_detail(self) -> None:
        if self._spec.detail is not True:
            expected = "expected true: steps and series are not kept otherwise"
            raise BadInput(expected, field="detail", value=self._spec.detail, file=self.scenario.path)


def simulate(
    scenario: str | Path | Scenario,
    overrides: Overrides | None = None,
    *,
    replications: int = 1,
    draws: int | None = None,
    trace: str | Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
) -> Result:
    """Simulate a serving system. Prints nothing and writes nothing.

    Args:
        scenario: a file of kind `serving`, or the result of `load`.
        overrides: changed fields, as a mapping of dotted keys or as texts `key=value`.
        replications: runs with other seeds of the same workload; several give every metric a 95 % interval.
        draws: runs with what is not known of step times and memory drawn, in the first realisation of the workload;
            each unknown is then varied alone, too. 0, or at least 10; None: as many as replications, and 10 or
            more, if there are several.
        trace: file whose lengths, and arrivals where the scenario replays, take the place of the scenario's.
        jobs: processes, by default one for each core. A single run uses them if its engines are independent.
        executor: where the runs after the first are made: `local`, `dask`, `dask://host:port` or `ray`.

    Raises:
        BadInput: naming the file, the field or argument, the value and what was expected.
    """
    with errors_name_arguments():
        check_counts(jobs=jobs, replications=replications, draws=draws)
        choice = choose_executor(executor, jobs)
        source = opened(scenario, overrides, "serving")
        path = None if trace is None else path_of("trace", trace)
        sweep = prepare(source.document, source.path, [source.settings], path, replications, draws)
        with started_for(sweep, choice) as started:
            return run_all(sweep, source, {}, lambda key, point: None, started, jobs=jobs)


def started_for(sweep: ServingSweep, choice: ExecutorChoice) -> AbstractContextManager[Executor | None]:
    """The executor for the runs after the first; None, and nothing is started, if there are none."""
    return choice.start() if len(sweep.tasks) > 1 else contextlib.nullcontext()


def run_all(
    sweep: ServingSweep,
    scenario: Scenario,
    points: dict[str, Document],
    keep: Callable[[str, Document], None],
    executor: Executor | None,
    advance: Callable[[Task], object] = lambda task: None,
    requests: Path | None = None,
    jobs: int | None = None,
) -> Result:
    """Make the runs of one configuration that are not in `points`; the first always, for its requests and steps.

    Args:
        points: reports of runs made before, by key; completed in place.
        executor: of the others; None if there are none (`started_for`).
        keep: called with the key and the report of each run that is made, except the first.
        advance: called after each of these.
        requests: Parquet file to which the first run writes its requests as they finish; None keeps them in memory.
        jobs: processes of the first run; None: one for each core.

    Raises:
        BadInput: the reference run that the scenario names cannot be read.
    """
    task = sweep.tasks[0]
    spec = task.plan.scenario
    measured = _reference_run(sweep)
    first = _make_first(task, requests, jobs or processes.usable_cores())
    points[task.key] = report_run(first, task.plan)
    for finished in sweep.run(points, keep, executor) if executor else ():
        advance(finished)
    document = sweep.document(0, points)
    document["series"] = timeseries(first, spec.measure) if spec.detail is True else None
    document["measured"] = measured
    document["comparison"] = compare(document["summary"], measured["summary"]) if measured else None
    elsewhere = {key: point for key, point in points.items() if key != task.key}
    return Result(scenario, document, elsewhere, sweep, first)


def _make_first(task: Task, requests: Path | None, jobs: int) -> Run:
    """Make the first run; its requests go to a file, if one is named and the scenario keeps them.

    Requests of sessions stay in memory: which session each belongs to is added in the end.
    """
    plan, replication, draw = task.plan, task.replication, task.draw
    if requests is None or not plan.scenario.detail or not isinstance(plan.workload, Workload):
        return make_run(plan, replication, draw, processes=jobs)
    from reports.records.columns import writing_columns

    with writing_columns(requests) as write:
        return make_run(plan, replication, draw, write, jobs)


def _reference_run(sweep: ServingSweep) -> Document | None:
    """The measured run that the scenario names, read before anything is simulated."""
    plan = sweep.cases[0].plan
    spec = plan.scenario.measured
    if spec is None:
        return None
    return read_reference_run(plan.base / spec.requests, plan.base / spec.timeseries if spec.timeseries else None)
