"""`twin simulate`: one run of a serving system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twin.cli.options import ExecutorOptions, Flag, RepetitionOptions, RunOptions, Settings
from twin.process import configure_libraries, making_what_stays

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.api.scenario import Scenario
    from twin.api.simulation import Result
    from twin.executors.executor import Executor
    from twin.sweeps.serving_sweep import ServingSweep, Task


def simulate(
    scenario: Path,
    /,
    *,
    set_: Settings = None,
    trace: Path | None = None,
    events: Flag = False,
    repetitions: RepetitionOptions = RepetitionOptions(),  # noqa: B008 (frozen)
    execution: ExecutorOptions = ExecutorOptions(),  # noqa: B008 (frozen)
    run: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> int:
    """Simulate a serving system: its latencies, its throughput, and the work of its engines.

    Leaves a run folder with manifest, summary, every request's times, figures and an HTML report. A measured run that
    the scenario names is set beside the prediction. With replications or draws, the same command resumes a killed one,
    and an executor makes the runs after the first. A single run has several processes if its engines are independent.

    Parameters
    ----------
    scenario
        Scenario file (YAML) of kind serving, for example examples/vllm-rtxpro6000-llama31-8b.yaml.
    set_
        Change any field, key=value. Example: --set engine.max_num_seqs=256 --set workload.arrivals.rate=12
    trace
        Trace to play: lengths, and arrivals where the scenario replays.
    events
        Write trace-events.json.gz too: the steps of each engine, for Perfetto or chrome://tracing.
    """
    configure_libraries()
    with making_what_stays():
        repetitions.check()
        executor = execution.choose()
        source, plan = _prepare(scenario, set_ or [], trace, repetitions)

    from twin.api.simulation import started_for
    from twin.cli.console import print_run
    from twin.cli.runs import note_partial_replays, open_sweep

    note_partial_replays(plan)
    single, inputs = len(plan.tasks) == 1, {"scenario_file": str(scenario)}
    with (
        started_for(plan, executor) as started,
        open_sweep(plan, "simulate", run.runs, inputs, fresh=single) as folder,
    ):
        result = _run(plan, source, started, execution.jobs, folder, keep_requests=events)
        document = result.write(folder, figures=not run.no_figures, events=events)
    print_run(document, as_json=run.json)
    return 0


def _prepare(
    scenario: Path, changes: list[str], trace: Path | None, repetitions: RepetitionOptions
) -> tuple[Scenario, ServingSweep]:
    """Read and check the scenario with its changes, and everything that it names."""
    from scenarios.overrides import single_settings
    from scenarios.reading import read_scenario
    from twin.api.scenario import Scenario
    from twin.sweeps.serving_sweep import prepare

    settings = single_settings(changes, "; twin sweep tries several")
    source = Scenario(scenario, read_scenario(scenario, "serving"), settings)
    replications, draws = repetitions.replications, repetitions.draws
    return source, prepare(source.document, scenario, [settings], trace, replications, draws)


def _run(
    plan: ServingSweep,
    source: Scenario,
    executor: Executor | None,
    jobs: int | None,
    run: RunDirectory,
    *,
    keep_requests: bool,
) -> Result:
    """Make every run that the folder does not have, with progress on stderr where there are several."""
    from twin.api.simulation import REQUESTS, run_all
    from twin.cli.console import progress
    from twin.cli.runs import note_resumed

    requests = None if keep_requests else run.path / REQUESTS
    if len(plan.tasks) == 1:
        _note_one_process(plan, jobs)
        return run_all(plan, source, {}, run.add_point, executor, jobs=jobs, requests=requests)
    points = run.points()
    count = len(points) + 1  # the first run is made each time, for its requests and steps
    if points:
        note_resumed(run.path, count, len(plan.tasks))
    with progress("simulating", len(plan.tasks), count) as advance:

        def advance_task(task: Task) -> None:
            advance(f"replication {task.replication}" + ("" if task.draw is None else f", draw {task.draw}"))

        return run_all(plan, source, points, run.add_point, executor, advance_task, requests, jobs)


def _note_one_process(plan: ServingSweep, jobs: int | None) -> None:
    """Note on stderr that a run has one process although more are wanted, and why."""
    from twin.cli.console import note
    from twin.serving.run.independent_engines import why_together

    shared = why_together(plan.cases[0].plan) if jobs is not None and jobs > 1 else None
    if shared is not None:
        note(f"one process, since engines are not independent ({shared})")
