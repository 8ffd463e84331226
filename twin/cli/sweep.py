"""`twin sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory

FLAG = Parameter(negative=())


def sweep(
    scenario: Path,
    /,
    *,
    ratio: str | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    trace: Path | None = None,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
    jobs: int | None = None,
    fresh: Annotated[bool, FLAG] = False,
    no_figures: Annotated[bool, FLAG] = False,
    requests: Annotated[bool, FLAG] = False,
    replications: int = 1,
    draws: int = 0,
) -> int:
    """Throughput, idle time, TPOT and r* over A/F ratios; or any field of a serving scenario.

    For an AFD bundle, simulates it at every ratio and sets the published and the barrier-aware theory beside it. For a
    serving system, simulates every combination of the values given by --set. Leaves a run folder with manifest, points,
    summary, figures and an HTML report. A killed sweep is taken up again by the same command.

    Parameters
    ----------
    scenario
        Scenario file (YAML), for example examples/afd-deepseek-v3.yaml.
    ratio
        A/F ratios: 8, 1,2,4,8 or 1:32 or 1:32:4 or 7/2 (a 7A-2F bundle), or a list of these. Default: the scenario's.
    set_
        Change any field, key=value, or sweep it, key=v1,v2 (several keys: every combination). Example:
        --set batch_size=128,256 --set workload.decode.mean=100
    trace
        Trace whose lengths to use: Azure LLM CSV, Mooncake JSONL, a length-only CSV, or plain CSV/JSONL; .gz too.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Where run folders go.
    jobs
        Processes; default one a core.
    fresh
        Start anew even if an unfinished run of the same sweep is there.
    no_figures
        Leave out figures and the HTML report.
    requests
        Keep every request's times too, a Parquet file a point under requests/ in the run folder (AFD bundles).
    replications
        Runs of every configuration with other seeds; several give every metric a 95 % interval (serving systems).
    draws
        Draws from what the fit of the step-time model leaves open, each with all replications (serving systems).
    """
    from twin.cli.console import require_at_least
    from twin.scenarios.kinds import read_scenario
    from twin.scenarios.overrides import combinations, parse_overrides

    for flag, value, least in (("--jobs", jobs, 1), ("--replications", replications, 1), ("--draws", draws, 0)):
        require_at_least(flag, value, least)
    configurations = list(combinations(parse_overrides(set_ or [])))
    content = read_scenario(scenario)
    if content["kind"] == "serving":
        from twin.cli.serving_runs import sweep_serving
        from twin.sweeps.serving_sweep import prepare as prepare_serving

        _refuse({"--ratio": ratio is not None, "--requests": requests}, "afd-bundle", scenario)
        systems = prepare_serving(content, scenario, configurations, trace, replications, draws)
        return sweep_serving(systems, scenario, runs, jobs, as_json=json, fresh=fresh, figures=not no_figures)
    from twin.cli.drawing import illustrate
    from twin.cli.running import run_folder, run_points
    from twin.sweeps.ratio_sweep import prepare

    _refuse({"--replications": replications > 1, "--draws": draws > 0}, "serving", scenario)
    plan = prepare(content, scenario, ratio, configurations, trace)
    asked = {"scenario_file": str(scenario), "requests": requests}
    with run_folder(plan, "sweep", runs, fresh=fresh, asked=asked) as run:
        meanwhile = (lambda: None) if no_figures else load_figures
        document = run_points(plan, run, jobs, meanwhile, keep_requests=requests)
        run.write_json("summary.json", document)
        if not no_figures:
            illustrate(document, run)
        run.set_status(True, "complete")
    _show(document, run, json)
    return 0


def _refuse(given: dict[str, bool], kind: str, scenario: Path) -> None:
    """Flags that mean something for another kind of scenario only."""
    from workloads.errors import BadInput

    for flag, is_given in given.items():
        if is_given:
            raise BadInput(f"expected it for scenarios of kind {kind} only", field=flag, file=scenario)


def load_figures() -> None:
    """Import the drawing library, which takes a second, while the workers simulate."""
    import reports.afd.figures  # noqa: F401


def _show(document: dict[str, Any], run: RunDirectory, as_json: bool) -> None:
    from twin.cli.console import note, print_json, print_table

    if as_json:
        print_json(document)
    else:
        from reports.afd.table import sweep_table

        print_table(sweep_table(document))
    note(f"run folder: {run.path}")
