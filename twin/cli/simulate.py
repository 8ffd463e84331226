"""`twin simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.serving.run import Run
    from twin.sweeps.serving_sweep import ServingSweep

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
    draws: int = 0,
    jobs: int | None = None,
    events: Annotated[bool, FLAG] = False,
    no_figures: Annotated[bool, FLAG] = False,
) -> int:
    """One run of a serving system: latencies, throughput, and what its engines did.

    Leaves a run folder with manifest, summary, every request's times, figures and an HTML report. Where the scenario
    names a measured run, it is set beside the prediction.

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
        Where run folders go.
    replications
        Runs with other seeds of the same workload; several give every metric a 95 % interval.
    draws
        Draws from what the fit of the step-time model leaves open, each with all replications; 0 takes its estimates.
    jobs
        Processes; default one a core.
    events
        Write trace-events.json.gz too: what ran where, for Perfetto or chrome://tracing.
    no_figures
        Leave out figures and the HTML report.
    """
    from twin.cli.console import note, print_json, print_table, require_at_least
    from twin.cli.serving_runs import serving_run_folder
    from twin.scenarios.kinds import read_scenario
    from twin.scenarios.overrides import single_settings
    from twin.sweeps.serving_sweep import prepare

    for flag, value, least in (("--jobs", jobs, 1), ("--replications", replications, 1), ("--draws", draws, 0)):
        require_at_least(flag, value, least)
    settings = single_settings(set_ or [], "; twin sweep tries several")
    plan = prepare(read_scenario(scenario), scenario, [settings], trace, replications, draws)
    with serving_run_folder(plan, "simulate", runs, scenario, fresh=True) as run:
        document, first = _run(plan, jobs)
        document["run"] = {"id": run.id, "directory": str(run.path)}
        _keep(document, first, run, figures=not no_figures, events=events)
        run.set_status(True, "complete")
    if json:
        print_json(document)
    else:
        from reports.serving.table import simulation_table

        print_table(simulation_table(document))
    note(f"run folder: {run.path}")
    return 0


def _run(plan: ServingSweep, jobs: int | None) -> tuple[dict[str, Any], Run | None]:
    """The document, and the first run itself for what is shown of single requests."""
    from twin.serving.measured import compare
    from twin.serving.series import series
    from twin.sweeps.serving_sweep import make_run, report_run

    first_task = plan.tasks[0]
    measured = _measured(plan)
    first = make_run(first_task)
    done = {first_task.key: report_run(first, first_task.plan)}
    _finish(plan, done, jobs)
    document = plan.document(0, done)
    scenario = first_task.plan.scenario
    document["series"] = series(first, scenario.measure) if scenario.detail else None
    document["measured"] = measured
    document["comparison"] = compare(document["summary"], measured["summary"]) if measured else None
    return document, first if scenario.detail else None


def _finish(plan: ServingSweep, done: dict[str, Any], jobs: int | None) -> None:
    from twin.cli.console import progress
    from twin.sweeps.parallel import usable_cores

    if len(plan.tasks) == 1:
        return
    with progress("simulating", len(plan.tasks), 1) as advance:
        for task in plan.run(done, lambda key, point: None, jobs or usable_cores()):
            advance(f"replication {task.replication}" + ("" if task.draw is None else f", draw {task.draw}"))


def _measured(plan: ServingSweep) -> dict[str, Any] | None:
    """The measured run that the scenario names, read before anything is simulated."""
    from twin.serving.measured import read_measured

    case = plan.cases[0].plan
    spec = case.scenario.measured
    if spec is None:
        return None
    return read_measured(case.base / spec.requests, case.base / spec.timeseries if spec.timeseries else None)


def _keep(document: dict[str, Any], first: Run | None, run: RunDirectory, *, figures: bool, events: bool) -> None:
    """Everything on disk, the summary last."""
    if first is not None:
        from reports.records.columns import write_columns

        write_columns(run.path / "requests.parquet", first.columns.table())
        if events:
            from reports.serving.trace_events import write_trace_events

            write_trace_events(run.path / "trace-events.json.gz", first.logs, first.columns)
    if figures:
        from twin.cli.drawing import illustrate

        illustrate(document, run)
    run.write_json("summary.json", document)
