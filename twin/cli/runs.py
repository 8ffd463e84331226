"""`twin simulate`, `sweep`, `ablate` and `report`: simulations in run folders, with progress, and drawn again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from reports.run_directory import open_run, read_run
from twin import __version__
from twin.cli.console import (
    ExecutorOptions,
    Flag,
    Fresh,
    RepetitionOptions,
    RunOptions,
    Settings,
    note,
    print_run,
    progress,
)
from twin.process import configure_libraries, making_what_stays
from workloads.errors import BadInput

if TYPE_CHECKING:
    from reports.run_directory import RunDirectory
    from twin.api.inputs import ExecutorChoice
    from twin.api.simulation import Others
    from twin.executors.executor import Executor
    from twin.serving.plan.plan import ServingPlan
    from twin.sweeps.serving_sweep import ServingSweep, Sweep, Task

    Summarise = Callable[[dict[str, Any]], dict[str, Any]]
    """Makes the document of a sweep from those of its runs."""


def open_sweep(sweep: Sweep[Any], command: str, runs: Path, inputs: dict[str, Any], *, fresh: bool) -> RunDirectory:
    """The run folder of a sweep; `inputs` stand in front of its own."""
    return open_folder(command, runs, {**inputs, **sweep.inputs()}, sweep.fingerprint, fresh=fresh)


def open_folder(
    command: str, runs: Path, inputs: dict[str, Any], fingerprint: Callable[[str], str], *, fresh: bool
) -> RunDirectory:
    """A run folder, to be opened with `with`: an unfinished one of the same fingerprint is resumed unless `fresh`.

    Args:
        inputs: entries of the manifest. fingerprint: of the inputs and the version that it is called with.
    """
    from twin.api.run_folder import manifest

    return open_run(runs, command, fingerprint(__version__), manifest(inputs), resume=not fresh)


def simulate_missing(sweep: Sweep[Any], run: RunDirectory, executor: Executor, *, figures: bool) -> dict[str, Any]:
    """Simulate what the folder lacks, each run on disk as soon as it is done; returns the documents of all, by key.

    `figures`: import the drawing library, which takes a second, once the workers are busy.
    """
    points = run.points()
    total = len(sweep.tasks)
    if points:
        note_resumed(run.path, len(points), total)
    meanwhile = partial(import_module, "reports.svg") if figures else lambda: None
    with progress("simulating", total, len(points)) as advance:
        for task in sweep.run(points, run.add_point, executor, meanwhile, run.path):
            advance(sweep.label(task))
    return points


def note_resumed(folder: Path, count: int, total: int) -> None:
    """Note on stderr that a folder has finished runs."""
    note(f"taking up {folder}: {count} of {total} runs are done")


def note_partial_replay(*plans: ServingPlan) -> None:
    """Note on stderr, before anything runs, that `workload.requests` ends a replay before its trace ends."""
    partial = [plan.replayed for plan in plans if plan.replayed and plan.replayed["requests"] < plan.replayed["rows"]]
    if partial:
        from reports.serving_sentences import part_of_trace

        for text in dict.fromkeys(map(part_of_trace, partial)):
            note(text)


def report(run: Path, /) -> int:
    """Draw a run's figures and its self-contained HTML page again, from its summary.

    It takes any run: a sweep or simulation of a serving system or an AFD bundle, or a reproduced paper.

    Args:
        run: Run folder, for example runs/20260101T120000-sweep-0123456789.
    """
    from twin.api.run_folder import draw, illustrate

    manifest, summary = _read(run)
    try:
        figures, page = draw(summary, manifest)
    except BadInput as error:
        raise error.in_file(run / "summary.json") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        lacking = f"the field {error}" if isinstance(error, KeyError) else f"other values ({error})"
        expected = f"expected a whole document of schema {summary['schema']}, with {lacking}"
        raise BadInput(expected, file=run / "summary.json") from None
    print(illustrate(run, figures, page))
    return 0


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        manifest, summary = read_run(run)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"expected a run folder: {reason}", file=run) from None
    if summary is None:
        status, command = manifest.get("status", "unknown"), manifest.get("command", "not said")
        raise BadInput(f"expected a finished run, this one is not ({status}); the command was: {command}", file=run)
    return manifest, summary


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
        from scenarios.reading import read_scenario, single_settings
        from twin.api.inputs import Scenario, check_counts, choose_executor
        from twin.api.simulation import REQUESTS, simulate_plan, started_for
        from twin.serving.results.report import run_fingerprint, run_inputs
        from twin.sweeps.one_run import read_plan

        replications, draws, sweep = repetitions.replications, repetitions.draws, None
        check_counts(replications, draws)
        choice = choose_executor(execution.executor, execution.jobs)
        settings = single_settings(set_ or [], "; twin sweep tries several")
        source = Scenario(scenario, read_scenario(scenario, "serving"), settings)
        if replications == 1 and not draws:
            plan = read_plan(source.document, scenario, settings, trace)
        else:
            from twin.sweeps.serving_sweep import prepare

            sweep = prepare(source.document, scenario, [settings], trace, replications, draws)
            plan = sweep.cases[0].plan

    note_partial_replay(plan)
    if sweep is None and (execution.jobs or 1) > 1:
        from twin.serving.run.independent_engines import why_together

        if shared := why_together(plan):
            note(f"one process, since engines are not independent ({shared})")
    inputs = {"scenario_file": str(scenario), **run_inputs([plan], replications, draws)}
    name = partial(run_fingerprint, [plan], replications=replications, draws=draws)
    once = sweep is None or len(sweep.tasks) == 1
    with (
        started_for(sweep, choice) as executor,
        open_folder("simulate", run.runs, inputs, name, fresh=once) as folder,
    ):
        with contextlib.nullcontext() if sweep is None else _others(sweep, executor, folder) as others:
            requests = None if events else folder.path / REQUESTS
            result = simulate_plan(plan, source, draws, requests, execution.jobs, others)
        document = result.write(folder, figures=not run.no_figures, events=events)
    print_run(document, as_json=run.json)
    return 0


@contextlib.contextmanager
def _others(sweep: ServingSweep, executor: Executor, folder: RunDirectory) -> Iterator[Others]:
    """The runs after the first, of which the folder may have some, with progress on stderr."""
    from twin.api.simulation import Others

    points, count = folder.points(), len(sweep.tasks)
    if points:
        note_resumed(folder.path, len(points) + 1, count)
    # the first run is made each time, for its requests and steps
    with progress("simulating", count, len(points) + 1) as advance:

        def advance_task(task: Task) -> None:
            advance(f"replication {task.replication}" + ("" if task.draw is None else f", draw {task.draw}"))

        yield Others(sweep, executor, points, folder.add_point, advance_task)


INSTEAD = {
    "afd-bundle": ": sweep it with --ratio and --set",
    "serving": ": run it with twin simulate, or sweep its fields with twin sweep --set FIELD=V1,V2",
}
"""The way in which each kind of scenario is swept, for errors that refuse a flag of the other kind."""


def sweep(
    scenario: Path,
    /,
    *,
    ratio: str | None = None,
    set_: Settings = None,
    zip_: Annotated[list[str] | None, Parameter(name="--zip", negative=(), consume_multiple=True)] = None,
    trace: Path | None = None,
    requests: Flag = False,
    fresh: Fresh = False,
    repetitions: RepetitionOptions = RepetitionOptions(),  # noqa: B008 (frozen)
    execution: ExecutorOptions = ExecutorOptions(),  # noqa: B008 (frozen)
    run: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> int:
    """Sweep A/F ratios of an AFD bundle, or any field of a serving scenario.

    An AFD bundle is simulated at every ratio, beside the published and the barrier-aware theory: throughput, idle time,
    TPOT and r*. A serving system is simulated with every combination of the values given by --set. Leaves a run folder
    with manifest, points, summary, figures and an HTML report. The same command resumes a killed sweep.

    Args:
        scenario: Scenario file (YAML), for example examples/afd-deepseek-v3.yaml.
        ratio: A/F ratios: 8, 1,2,4,8 or 1:32 or 1:32:4 or 7/2 (a 7A-2F bundle), or a list of these. Default: the
            scenario's.
        set_: Change any field, key=value, or sweep it, key=v1,v2 or key=start:stop:step (several keys: every
            combination). Example: --set batch_size=128,256 --set workload.decode.mean=100
        zip_: Fields that vary together, key=v1,v2 with as many values each: the first values make one configuration,
            the second another. Example: --zip system.replicas=1,2,4 workload.arrivals.rate=5,10,20
        trace: Trace whose lengths to use: Azure LLM CSV, Mooncake JSONL, a length-only CSV, or plain CSV/JSONL; .gz
            too.
        requests: Keep every request's times too, in Parquet files under requests/ in the run folder (AFD bundles).
    """
    configure_libraries()
    from scenarios.reading import combinations, parse_overrides, parse_zipped, read_scenario
    from twin.api.inputs import check_counts, choose_executor
    from twin.api.sweep import prepare_sweep
    from twin.sweeps.serving_sweep import ServingSweep

    replications, draws = repetitions.replications, repetitions.draws
    check_counts(replications, draws)
    executor = choose_executor(execution.executor, execution.jobs)
    configurations = list(combinations(parse_overrides(set_ or []), parse_zipped(zip_ or [])))
    document = read_scenario(scenario, "afd-bundle", "serving")
    with progress("preparing", len(configurations), 0, patience=2.0) as advance:
        plan = prepare_sweep(
            document, scenario, configurations, trace, ratio, replications, draws, requests=requests, instead=INSTEAD,
            advance=advance,
        )  # fmt: skip
    if isinstance(plan, ServingSweep):
        note_partial_replay(*(case.plan for case in plan.cases))
    return _run_sweep(plan, plan.summarise, "sweep", scenario, executor, run, fresh=fresh)


def _run_sweep(
    sweep: Sweep[Any], summarise: Summarise, command: str, scenario: Path, executor: ExecutorChoice,
    options: RunOptions, *, fresh: bool,
) -> int:  # fmt: skip
    """Make the runs of a sweep in its folder, and print their summary."""
    from twin.api.run_folder import complete

    inputs = {"scenario_file": str(scenario)}
    with executor.start() as started, open_sweep(sweep, command, options.runs, inputs, fresh=fresh) as folder:
        documents = simulate_missing(sweep, folder, started, figures=not options.no_figures)
        result = complete(folder, summarise(documents), figures=not options.no_figures)
    print_run(result, as_json=options.json)
    return 0


def ablate(
    scenario: Path,
    /,
    *,
    features: str | None = None,
    change: Annotated[list[str] | None, Parameter(negative=())] = None,
    set_: Settings = None,
    trace: Path | None = None,
    objective: str | None = None,
    replications: int = 5,
    draws: int | None = None,
    fresh: Fresh = False,
    execution: ExecutorOptions = ExecutorOptions(),  # noqa: B008 (frozen)
    run: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> int:
    """Switch each feature of a serving system on and off, on the same requests: which pay, and which cost.

    Each feature is compared alone, with the rest as in the scenario, and with the others on. A change has a 95 %
    interval over replications and over what is not known of step times; `undecided` says that it includes zero. Leaves
    a run folder with a chart; the same command resumes a killed run.

    Args:
        scenario: Scenario file (YAML) of kind serving.
        features: Of prefix_caching, offload, routing, speculation, async_scheduling, parallelism, data_parallel,
            disaggregate, with commas; default: all that the scenario can have.
        change: A feature of your own, key=v1,v2: values of a field, each compared with the scenario's. Example:
            --change engine.max_num_batched_tokens=1024,4096
        set_: Change any field first, key=value.
        trace: Trace to play: lengths, and arrivals where the scenario replays.
        objective: The metric that decides: goodput, output_throughput, e2e.mean, cost_per_million_output_tokens or
            energy.joules_per_output_token. Default: goodput where measure.slo has goals, throughput in a closed loop,
            else the mean latency.
        replications: Runs of each configuration with other seeds; the same seeds for all.
        draws: Runs with what is not known of step times drawn, 10 or more; default: as many as replications.
    """
    configure_libraries()
    from scenarios.reading import apply, parse_overrides, read_scenario, single_settings
    from twin.api.inputs import choose_executor, require_at_least
    from twin.sweeps.ablation import prepare_ablation

    require_at_least("--replications", replications, 2)
    executor = choose_executor(execution.executor, execution.jobs)
    document = apply(read_scenario(scenario, "serving"), single_settings(set_ or []))
    ablation = prepare_ablation(
        document,
        scenario,
        names=None if features is None else features.split(","),
        more=parse_overrides(change or [], "--change"),
        objective=objective,
        trace=trace,
        replications=replications,
        draws=draws,
    )
    return _run_sweep(ablation.sweep, ablation.summarise, "ablate", scenario, executor, run, fresh=fresh)
