"""`twin sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.sweeps.ratio_sweep import RatioSweep

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
) -> int:
    """Throughput, idle time, TPOT and r* over A/F ratios.

    Simulates the scenario's bundle at every ratio, sets the published and the barrier-aware theory beside it, and
    leaves a run folder with manifest, points, summary, figures and an HTML report. A killed sweep is taken up again
    by the same command.

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
    """
    from twin.cli.console import require_at_least
    from twin.scenarios.afd import read_scenario
    from twin.scenarios.overrides import parse_overrides
    from twin.sweeps.parallel import usable_cores
    from twin.sweeps.ratio_sweep import prepare

    require_at_least("--jobs", jobs, 1)
    plan = prepare(read_scenario(scenario), scenario, ratio, parse_overrides(set_ or []), trace)
    run = _open(plan, scenario, runs, fresh)
    try:
        document = _run(plan, run, jobs or usable_cores(), figures=not no_figures)
    except BaseException as error:
        run.abandon(f"{type(error).__name__}: {error}".rstrip(": "))
        raise
    finally:
        run.close()
    _show(document, run, json)
    return 0


def _open(plan: RatioSweep, scenario: Path, runs: Path, fresh: bool) -> RunDirectory:
    from reports.records.run_directory import open_run
    from twin.cli.manifest import manifest

    first = plan.cases[0].plan
    asked: dict[str, Any] = {
        "scenario_file": str(scenario),
        "scenarios": [case.plan.scenario.model_dump(mode="json", by_alias=True) for case in plan.cases],
        "ratios": [str(topology.ratio) for topology in plan.topologies],
        "seed": first.scenario.seed,
        "calibration": first.calibration.name,
        "calibration_hash": first.calibration.content_hash(),
        "trace": None if first.trace is None else first.trace.name,
    }
    content = manifest(asked)
    fingerprint = plan.fingerprint(str(content["version"]))
    return open_run(runs, "sweep", fingerprint, content, resume=not fresh)


def _run(plan: RatioSweep, run: RunDirectory, jobs: int, *, figures: bool) -> dict[str, Any]:
    from twin.cli.console import note, progress

    done = run.points()
    if done:
        note(f"taking up {run.path}: {len(done)} points are done")

    def meanwhile() -> None:
        plan.prepare_theory()
        if figures:
            import reports.afd.figures  # noqa: F401  slow to import: while the workers simulate

    with progress("simulating", plan.size, len(done)) as advance:
        for point in plan.run(done, run.add_point, jobs, meanwhile):
            advance(f"r = {point['ratio']:g}")
    document = plan.summarise(done)
    document["run"] = {"id": run.id, "directory": str(run.path)}
    run.write_json("summary.json", document)
    if figures:
        _illustrate(document, run)
    run.set_status(True, "complete")
    return document


def _illustrate(document: dict[str, Any], run: RunDirectory) -> None:
    from reports.afd.figures import sweep_figures
    from reports.afd.page import sweep_page

    drawn = sweep_figures(document)
    for name, svg in drawn.items():
        run.write_text(f"figures/{name}.svg", svg)
    run.write_text("report.html", sweep_page(document, run.manifest, drawn))


def _show(document: dict[str, Any], run: RunDirectory, as_json: bool) -> None:
    from twin.cli.console import note, print_json, print_table

    if as_json:
        print_json(document)
    else:
        from reports.afd.table import sweep_table

        print_table(sweep_table(document))
    note(f"run folder: {run.path}")
