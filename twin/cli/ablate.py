"""`twin ablate`: which features of a serving system pay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twin.cli.options import ExecutorOptions, Fresh, RunOptions, Settings
from twin.process import configure_libraries


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

    Parameters
    ----------
    scenario
        Scenario file (YAML) of kind serving.
    features
        Of prefix_caching, offload, routing, speculation, async_scheduling, parallelism, disaggregate, with commas;
        default: all that the scenario can have.
    change
        A feature of your own, key=v1,v2: values of a field, each compared with the scenario's. Example: --change
        engine.max_num_batched_tokens=1024,4096
    set_
        Change any field first, key=value.
    trace
        Trace to play: lengths, and arrivals where the scenario replays.
    objective
        The metric that decides: goodput, output_throughput or e2e.mean. Default: goodput where measure.slo has goals,
        throughput in a closed loop, else the mean latency.
    replications
        Runs of each configuration with other seeds; the same seeds for all.
    draws
        Runs with what is not known of step times drawn, 10 or more; default: as many as replications.
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
        simulate_missing(ablation.sweep, folder, started, (lambda: None) if run.no_figures else load_figures)
        result = complete(folder, ablation.summarise(folder.points()), figures=not run.no_figures)
    print_run(result, as_json=run.json)
    return 0
