"""`twin.simulate`: one serving system, simulated, and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin import process
from twin.api.inputs import (
    ExecutorChoice,
    Overrides,
    Scenario,
    check_counts,
    choose_executor,
    errors_name_arguments,
    opened,
    path_of,
)
from twin.api.run_folder import complete, figure, new_run
from twin.executors.executor import Executor, Processes
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.report import compare, read_reference_run, run_document, run_inputs, timeseries
from twin.sweeps import one_run
from twin.sweeps.one_run import read_plan
from workloads.errors import BadInput
from workloads.generator import Workload

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from reports.run_directory import RunDirectory
    from twin.sweeps.serving_sweep import ServingSweep, Task

Document = dict[str, Any]

REQUESTS = "requests.parquet"
"""The file of a run folder with a row for each request of the first run."""


@dataclass(frozen=True)
class Result:
    """Results of a simulated serving system. DataFrames are made when they are first read.

    With several replications or draws, `summary` and `document` (as `twin simulate --json` prints it) are of all of
    them; requests, steps, engines and time series are of the first. `points`: reports of the runs after the first, by
    key. docs/reference/python.md has columns and units.
    """

    scenario: Scenario
    document: Document
    points: dict[str, Document]
    _repetitions: tuple[int, int | None]
    _first: one_run.Result

    def __repr__(self) -> str:
        from reports.serving_sentences import headline

        return f"<{self.scenario.name}: {headline(self.document)}>"

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row for each metric (`ttft.p99`, `output_throughput`): value, unit, and, of several runs, intervals."""
        from twin.api.frames import summary_frame

        return summary_frame(self.document)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row for each request of the first run, in the order of their ends; fewer columns without detail."""
        from twin.api.frames import requests_frame

        return requests_frame(self._first.run, self._first.plan.scenario.measure)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row for each engine step of the first run, times in seconds; `BadInput` without `detail: true`."""
        from twin.api.frames import steps_frame

        self._require_detail()
        return steps_frame(self._first.run.logs)

    @cached_property
    def engines(self) -> pd.DataFrame:
        """One row for each engine of the first run: utilisation, steps, tokens and preemptions."""
        import pandas as pd

        return pd.DataFrame(self.document["engines"])

    @cached_property
    def timeseries(self) -> pd.DataFrame:
        """Running and waiting requests, KV blocks, and autoscaled engines, at even times; `BadInput` without detail."""
        import pandas as pd

        self._require_detail()
        series = self.document["series"]
        columns = {name: series[name] for name in ("time", "running", "waiting", "kv_used")}
        return pd.DataFrame(columns | series.get("engines", {}))

    def plot(self, kind: str = "latencies") -> Figure:
        """A matplotlib figure, `latencies` or `over-time`; `BadInput` for another kind, or without `detail: true`."""
        self._require_detail()
        return figure(self.document, kind)

    def save(self, folder: str | Path, *, figures: bool = True, events: bool = False) -> Path:
        """Write a run folder like that of `twin simulate`; returns its path. `BadInput` if it is not empty, else
        `OSError`.

        `events`: `trace-events.json.gz` too, for Perfetto. Only for runs with detail.
        """
        inputs = run_inputs([self._first.plan], *self._repetitions)
        with new_run(folder, self.scenario.path, inputs, "twin.simulate(…).save(…)") as run:
            for key, point in self.points.items():
                run.add_point(key, point)
            self.write(run, figures=figures, events=events)
        return run.path

    def write(self, run: RunDirectory, *, figures: bool, events: bool) -> Document:
        """Write requests, summary, figures and page into a run folder, which is complete then; returns the summary."""
        first, detail = self._first.run, self._first.plan.scenario.detail
        if detail:
            if first.columns.sink is None:
                from reports.run_directory import write_columns

                write_columns(run.path / REQUESTS, first.request_table())
            if events and detail is True:
                from reports.serving_run import write_trace_events

                write_trace_events(run.path / "trace-events.json.gz", first.logs, first.columns)
        return complete(run, self.document, figures=figures)

    def _repr_html_(self) -> str:
        from html import escape

        from reports.serving_sentences import headline

        html: str = self.summary.to_html(na_rep="–")
        return f"<p>{escape(headline(self.document))}</p>{html}"

    def _require_detail(self) -> None:
        detail = self._first.plan.scenario.detail
        if detail is not True:
            expected = "expected true: steps and series are not kept otherwise"
            raise BadInput(expected, field="detail", value=detail, file=self.scenario.path)


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
        check_counts(replications, draws)
        choice = choose_executor(executor, jobs)
        source = opened(scenario, overrides, "serving")
        path = None if trace is None else path_of("trace", trace)
        if replications == 1 and not draws:
            plan = read_plan(source.document, source.path, source.settings, path)
            return simulate_plan(plan, source, draws, jobs=jobs)
        from twin.sweeps.serving_sweep import prepare

        sweep = prepare(source.document, source.path, [source.settings], path, replications, draws)
        with started_for(sweep, choice) as started:
            return simulate_plan(sweep.cases[0].plan, source, draws, jobs=jobs, others=Others(sweep, started))


def started_for(sweep: ServingSweep | None, choice: ExecutorChoice) -> AbstractContextManager[Executor]:
    """The executor for the runs after the first; nothing is started if there are none."""
    return choice.start() if sweep is not None and len(sweep.tasks) > 1 else contextlib.nullcontext(Processes(1))


@dataclass(frozen=True)
class Others:
    """The other runs of a configuration: those that are not in `points` are made on the executor, after the first.

    `keep` is called with the key and the report of each, which `points` gets, too.
    """

    sweep: ServingSweep
    executor: Executor
    points: dict[str, Document] = field(default_factory=dict)
    keep: Callable[[str, Document], None] = lambda key, point: None
    advance: Callable[[Task], object] = lambda task: None

    def document(self, first: Document) -> Document:
        """The document of all runs, given the report of the first."""
        key = self.sweep.tasks[0].key
        self.points[key] = first
        for task in self.sweep.run(self.points, self.keep, self.executor):
            self.advance(task)
        document = self.sweep.document(0, self.points)
        del self.points[key]
        return document


def simulate_plan(
    plan: ServingPlan,
    scenario: Scenario,
    draws: int | None = None,
    requests: Path | None = None,
    jobs: int | None = None,
    others: Others | None = None,
) -> Result:
    """Run a plan, once or with others. `requests`: Parquet file for those of the first run, as they finish; None: they
    stay in memory, as requests of sessions do, since which session each belongs to is added in the end.

    Raises `BadInput` for a reference run that cannot be read, and a plan that turns out not to run.
    """
    spec, measured = plan.scenario, None
    if spec.measured is not None:
        series = spec.measured.timeseries
        measured = read_reference_run(plan.base / spec.measured.requests, plan.base / series if series else None)
    processes = jobs or process.usable_cores()
    if requests is None or not spec.detail or not isinstance(plan.workload, Workload):
        first = one_run.simulate(plan, processes=processes)
    else:
        from reports.run_directory import writing_columns

        with writing_columns(requests) as write:
            first = one_run.simulate(plan, sink=write, processes=processes)
    document = others.document(first.report) if others else run_document(plan, scenario.settings, first.report)
    document["series"] = timeseries(first.run, spec.measure) if spec.detail is True else None
    document["measured"] = measured
    document["comparison"] = compare(document["summary"], measured["summary"]) if measured else None
    repetitions = (others.sweep.replications if others else 1, draws)
    return Result(scenario, document, others.points if others else {}, repetitions, first)
