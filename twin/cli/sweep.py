"""`twin sweep` and `twin ablate`: many configurations of a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twin.cli.options import ExecutorOptions, Flag, Fresh, RepetitionOptions, RunOptions, Settings
from twin.process import configure_libraries

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
    from scenarios.overrides import combinations, parse_overrides, parse_zipped
    from scenarios.reading import read_scenario
    from twin.api.run_folder import complete
    from twin.api.sweep import prepare_sweep
    from twin.cli.console import print_run, progress
    from twin.cli.runs import load_figures, note_partial_replay, open_sweep, simulate_missing
    from twin.sweeps.serving_sweep import ServingSweep

    repetitions.check()
    executor = execution.choose()
    configurations = list(combinations(parse_overrides(set_ or []), parse_zipped(zip_ or [])))
    document = read_scenario(scenario, "afd-bundle", "serving")
    replications, draws = repetitions.replications, repetitions.draws
    with progress("preparing", len(configurations), 0, patience=2.0) as advance:
        plan = prepare_sweep(
            document, scenario, configurations, trace, ratio, replications, draws, requests=requests, instead=INSTEAD,
            advance=advance,
        )  # fmt: skip
    if isinstance(plan, ServingSweep):
        note_partial_replay(*(case.plan for case in plan.cases))
    inputs = {"scenario_file": str(scenario)}
    with executor.start() as started, open_sweep(plan, "sweep", run.runs, inputs, fresh=fresh) as folder:
        documents = simulate_missing(plan, folder, started, (lambda: None) if run.no_figures else load_figures)
        result = complete(folder, plan.summarise(documents), figures=not run.no_figures)
    print_run(result, as_json=run.json)
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
    from scenarios.overrides import apply, parse_overrides, single_settings
    from scenarios.reading import read_scenario
    from twin.api.arguments import require_at_least
    from twin.api.run_folder import complete
    from twin.cli.console import print_run
    from twin.cli.runs import load_figures, open_sweep, simulate_missing
    from twin.sweeps.ablation import prepare_ablation

    require_at_least("--replications", replications, 2)
    executor = execution.choose()
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
    inputs = {"scenario_file": str(scenario)}
    with executor.start() as started, open_sweep(ablation.sweep, "ablate", run.runs, inputs, fresh=fresh) as folder:
        points = simulate_missing(ablation.sweep, folder, started, (lambda: None) if run.no_figures else load_figures)
        result = complete(folder, ablation.summarise(points), figures=not run.no_figures)
    print_run(result, as_json=run.json)
    return 0
