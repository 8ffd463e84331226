"""`twin sweep`: many configurations of a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from twin.process import configure_libraries

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory

FLAG = Parameter(negative=())

HOW = {
    "afd-bundle": ": sweep it with --ratio and --set",
    "serving": ": run it with twin simulate, or sweep its fields with twin sweep --set FIELD=V1,V2",
}
"""The way in which each kind of scenario is swept, for errors that refuse a flag of the other kind."""


def sweep(
    scenario: Path,
    /,
    *,
    ratio: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    zip_: Annotated[list[str] | None, Parameter(name="--zip", negative=(), consume_multiple=True)] = None,
    trace: Path | None = None,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
    jobs: int | None = None,
    executor: str = "local",
    fresh: Annotated[bool, FLAG] = False,
    no_figures: Annotated[bool, FLAG] = False,
    requests: Annotated[bool, FLAG] = False,
    replications: int = 1,
    draws: int | None = None,
) -> int:
    """Sweep A/F ratios of an AFD bundle, or any field of a serving scenario.

    An AFD bundle is simulated at every ratio, beside the published and the barrier-aware theory: throughput, idle time,
    TPOT and r*. A serving system is simulated with every combination of the values given by --set. Leaves a run folder
    with manifest, points, summary, figures and an HTML report. The same command resumes a killed sweep.

    Parameters
    ----------
    scenario
        Scenario file (YAML), for example examples/afd-deepseek-v3.yaml.
    ratio
        A/F ratios: 8, 1,2,4,8 or 1:32 or 1:32:4 or 7/2 (a 7A-2F bundle), or a list of these. Default: the scenario's.
    set_
        Change any field, key=value, or sweep it, key=v1,v2 or key=start:stop:step (several keys: every combination).
        Example: --set batch_size=128,256 --set workload.decode.mean=100
    zip_
        Fields that vary together, key=v1,v2 with as many values each: the first values make one configuration, the
        second another. Example: --zip system.replicas=1,2,4 workload.arrivals.rate=5,10,20
    trace
        Trace whose lengths to use: Azure LLM CSV, Mooncake JSONL, a length-only CSV, or plain CSV/JSONL; .gz too.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Parent of the run folders.
    jobs
        Processes; default: one for each core.
    executor
        Where points are simulated: local, dask (workers of its own), dask://host:port (a running scheduler) or ray.
    fresh
        Start anew even if an unfinished run of the same sweep exists.
    no_figures
        Leave out figures and the HTML report.
    requests
        Keep every request's times too, in Parquet files under requests/ in the run folder (AFD bundles).
    replications
        Runs of every configuration with other seeds; several give every metric a 95 % interval (serving systems).
    draws
        Runs with what is not known drawn, 10 or more; default: as many as replications if several (serving systems).
    """
    configure_libraries()
    from scenarios.overrides import combinations, parse_overrides, parse_zipped
    from scenarios.reading import read_scenario
    from twin.api.arguments import check_counts, refuse_for_kind
    from twin.cli.console import preparing
    from twin.executors.executor import choose_executor

    check_counts("--", jobs=jobs, replications=replications, draws=draws)
    chosen = choose_executor(executor, jobs)
    configurations = list(combinations(parse_overrides(set_ or []), parse_zipped(zip_ or [])))
    content = read_scenario(scenario, "afd-bundle", "serving")
    if content["kind"] == "serving":
        from twin.cli.serving_runs import sweep_serving
        from twin.sweeps.serving_sweep import prepare as prepare_serving

        refuse_for_kind({"--ratio": ratio is not None, "--requests": requests}, "afd-bundle", content, scenario, HOW)
        with preparing(configurations) as advance:
            systems = prepare_serving(content, scenario, configurations, trace, replications, draws, advance)
        return sweep_serving(systems, scenario, runs, chosen, as_json=json, fresh=fresh, figures=not no_figures)
    from twin.api.drawing import illustrate
    from twin.cli.ratio_runs import run_folder, run_points
    from twin.sweeps.ratio_sweep import prepare

    refuse_for_kind({"--replications": replications > 1, "--draws": bool(draws)}, "serving", content, scenario, HOW)
    with preparing(configurations) as advance:
        plan = prepare(content, scenario, ratio, configurations, trace, advance)
    asked = {"scenario_file": str(scenario), "requests": requests}
    with chosen.start() as started, run_folder(plan, "sweep", runs, fresh=fresh, asked=asked) as run:
        meanwhile = (lambda: None) if no_figures else load_figures
        document = run_points(plan, run, started, meanwhile, keep_requests=requests)
        run.write_json("summary.json", document)
        if not no_figures:
            illustrate(document, run)
        run.set_status(True, "complete")
    _show(document, run, json)
    return 0


def load_figures() -> None:
    """Import the drawing library, which takes a second, while the workers simulate."""
    import reports.svg  # noqa: F401


def _show(document: dict[str, Any], run: RunDirectory, as_json: bool) -> None:
    from twin.cli.console import note, print_result

    print_result(document, as_json=as_json)
    note(f"run folder: {run.path}")
