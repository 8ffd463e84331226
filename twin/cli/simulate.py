"""`twin simulate`: one run of a serving system."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.cli.options import ExecutorOptions, Flag, RepetitionOptions, RunOptions, Settings
from twin.process import configure_libraries, making_what_stays

if TYPE_CHECKING:
    from twin.api.scenario import Scenario
    from twin.executors.executor import Executor
    from twin.serving.plan.plan import ServingPlan
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

    Args:
        scenario: Scenario file (YAML) of kind serving, for example examples/vllm-rtxpro6000-llama31-8b.yaml.
        set_: Change any field, key=value. Example: --set engine.max_num_seqs=256 --set workload.arrivals.rate=12
        trace: Trace to play: lengths, and arrivals where the scenario replays.
        events: Write trace-events.json.gz too: the steps of each engine, for Perfetto or chrome://tracing.
    """
    configure_libraries()
    with making_what_stays():
        from scenarios.overrides import single_settings
        from scenarios.reading import read_scenario
        from twin.api.scenario import Scenario

        repetitions.check()
        choice = execution.choose()
        settings = single_settings(set_ or [], "; twin sweep tries several")
        source = Scenario(scenario, read_scenario(scenario, "serving"), settings)
        if repetitions.several:
            from twin.sweeps.serving_sweep import prepare

            replications, draws = repetitions.replications, repetitions.draws
            sweep = prepare(source.document, scenario, [settings], trace, replications, draws)
        else:
            from twin.sweeps.one_run import read_plan

            plan = read_plan(source.document, scenario, settings, trace)

    if repetitions.several:
        from twin.api.simulation import started_for

        with started_for(sweep, choice) as executor:
            document = _simulate_several(sweep, source, executor, execution.jobs, run, events=events)
    else:
        document = _simulate_plan(plan, source, repetitions.draws, execution.jobs, run, events=events)
    from twin.cli.console import print_run

    print_run(document, as_json=run.json)
    return 0


def _simulate_plan(
    plan: ServingPlan, source: Scenario, draws: int | None, jobs: int | None, options: RunOptions, *, events: bool
) -> dict[str, Any]:
    from twin.api.simulation import REQUESTS, simulate_plan
    from twin.cli.runs import note_partial_replay, open_folder
    from twin.serving.results.report import run_fingerprint, run_inputs

    note_partial_replay(plan)
    if jobs is not None and jobs > 1:
        _note_one_process(plan)
    inputs = {"scenario_file": str(source.path), **run_inputs([plan], 1, draws)}
    name = partial(run_fingerprint, [plan], replications=1, draws=draws)
    with open_folder("simulate", options.runs, inputs, name, fresh=True) as folder:
        result = simulate_plan(plan, source, draws, None if events else folder.path / REQUESTS, jobs)
        return result.write(folder, figures=not options.no_figures, events=events)


def _simulate_several(
    sweep: ServingSweep, source: Scenario, executor: Executor, jobs: int | None, options: RunOptions, *, events: bool
) -> dict[str, Any]:
    """Make every run that the folder does not have, with progress on stderr."""
    from twin.api.simulation import REQUESTS, simulate_several
    from twin.cli.console import progress
    from twin.cli.runs import note_partial_replay, note_resumed, open_sweep

    note_partial_replay(sweep.cases[0].plan)
    count, inputs = len(sweep.tasks), {"scenario_file": str(source.path)}
    with open_sweep(sweep, "simulate", options.runs, inputs, fresh=count == 1) as folder:
        points = folder.points()
        if points:
            note_resumed(folder.path, len(points) + 1, count)
        # the first run is made each time, for its requests and steps
        with progress("simulating", count, len(points) + 1) as advance:

            def advance_task(task: Task) -> None:
                advance(f"replication {task.replication}" + ("" if task.draw is None else f", draw {task.draw}"))

            requests = None if events else folder.path / REQUESTS
            result = simulate_several(sweep, source, points, folder.add_point, executor, advance_task, requests, jobs)
        return result.write(folder, figures=not options.no_figures, events=events)


def _note_one_process(plan: ServingPlan) -> None:
    """Note on stderr that a run has one process although more are wanted, and why."""
    from twin.cli.console import note
    from twin.serving.run.independent_engines import why_together

    shared = why_together(plan)
    if shared is not None:
        note(f"one process, since engines are not independent ({shared})")
