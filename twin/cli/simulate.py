"""`twin simulate`: one run of a serving system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from twin.process import configure_libraries, making_what_stays

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.api.scenario import Scenario
    from twin.api.simulation import Result
    from twin.executors.executor import Executor
    from twin.sweeps.serving_sweep import ServingSweep, Task

FLAG = Parameter(negative=())


def simulate(
    scenario: Path,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    trace: Path | None = None,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
    replications: int = 1,
    draws: int | None = None,
    jobs: int | None = None,
    executor: str = "local",
    events: Annotated[bool, FLAG] = False,
    no_figures: Annotated[bool, FLAG] = False,
) -> int:
    """Simulate a serving system: its latencies, its throughput, and the work of its engines.

    Leaves a run folder with manifest, summary, every request's times, figures and an HTML report. A measured run that
    the scenario names is set beside the prediction. With replications or draws, the same command resumes a killed one.

    Parameters
    ----------
    scenario
        Scenario file (YAML) of kind serving, for example examples/vllm-rtxpro6000-llama31-8b.yaml.
    set_
        Change any field, key=value. Example: --set engine.max_num_seqs=256 --set workload.arrivals.rate=12
    trace
        Trace to play: lengths, and arrivals where the scenario replays.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Parent of the run folders.
    replications
        Runs with other seeds of the same workload; several give every metric a 95 % interval.
    draws
        Runs with what is not known of step times and memory drawn, 10 or more; default: as many as replications if
        several.
    jobs
        Processes, for several runs, and for one run of independent engines; default: one for each core.
    executor
        Where runs after the first are made: local, dask (workers of its own), dask://host:port (a running scheduler)
        or ray.
    events
        Write trace-events.json.gz too: the steps of each engine, for Perfetto or chrome://tracing.
    no_figures
        Leave out figures and the HTML report.
    """
    configure_libraries()
    with making_what_stays():
        from twin.executors.executor import choose_executor

        chosen = choose_executor(executor, jobs)
        source, plan = _prepare(scenario, set_ or [], trace, replications=replications, draws=draws, jobs=jobs)

    from twin.api.simulation import started_for
    from twin.cli.console import note, print_result
    from twin.cli.serving_runs import note_partial_replays, serving_run_folder

    note_partial_replays(plan)
    single = len(plan.tasks) == 1
    with (
        started_for(plan, chosen) as started,
        serving_run_folder(plan, "simulate", runs, scenario, fresh=single) as run,
    ):
        result = _run(plan, source, started, jobs, run, keep_requests=events)
        document = result.write(run, figures=not no_figures, events=events)
        run.set_status(True, "complete")
    print_result(document, as_json=json)
    note(f"run folder: {run.path}")
    return 0


def _prepare(
    scenario: Path, changes: list[str], trace: Path | None, *, replications: int, draws: int | None, jobs: int | None
) -> tuple[Scenario, ServingSweep]:
    """Read and check the scenario with its changes, and everything that it names."""
    from scenarios.overrides import single_settings
    from scenarios.reading import read_scenario
    from twin.api.arguments import check_counts
    from twin.api.scenario import Scenario
    from twin.sweeps.serving_sweep import prepare

    check_counts("--", jobs=jobs, replications=replications, draws=draws)
    settings = single_settings(changes, "; twin sweep tries several")
    source = Scenario(scenario, read_scenario(scenario, "serving"), settings)
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
    from twin.cli.console import note, progress

    requests = None if keep_requests else run.path / REQUESTS
    if len(plan.tasks) == 1:
        _note_one_process(plan, jobs)
        return run_all(plan, source, {}, run.add_point, executor, jobs=jobs, requests=requests)
    done = run.points()
    begun = len(done) + 1  # the first run is made each time, for its requests and steps
    if done:
        note(f"taking up {run.path}: {begun} of {len(plan.tasks)} runs are done")
    with progress("simulating", len(plan.tasks), begun) as advance:

        def made(task: Task) -> None:
            advance(f"replication {task.replication}" + ("" if task.draw is None else f", draw {task.draw}"))

        return run_all(plan, source, done, run.add_point, executor, made, requests, jobs)


def _note_one_process(plan: ServingSweep, jobs: int | None) -> None:
    """Note on stderr that a run has one process although more are wanted, and why."""
    from twin.cli.console import note
    from twin.serving.run.independent_engines import why_together

    shared = why_together(plan.cases[0].plan) if jobs is not None and jobs > 1 else None
    if shared is not None:
        note(f"one process, since engines are not independent ({shared})")
