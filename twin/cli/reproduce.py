"""`twin reproduce`: computes a paper's tables and figures again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

FLAG = Parameter(negative=())


def reproduce(
    paper: Literal["afd", "fastafd", "prelude", "spear", "sun"],
    /,
    *,
    trace: Path | None = None,
    quality: Annotated[bool, FLAG] = False,
    full: Annotated[bool, FLAG] = False,
    seeds: int | None = None,
    data: Path | None = None,
    fit: str | None = None,
    fit_prompts: str | None = None,
    fit_data: Path | None = None,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
    jobs: int | None = None,
    fresh: Annotated[bool, FLAG] = False,
) -> int:
    """Compute a paper's tables and figures again, beside the published values.

    afd: the optimal ratios, and figures 4 to 7 by simulation (about a minute on two cores). fastafd: decode steps of
    real bundles over the ratio, predicted from part of them (seconds; needs --data). prelude: execution classes,
    prefix-led planning, and the serving tables (about a minute). spear: SLO-constrained chunks beside static ones, with
    tables that the static rows imply (two minutes with a trace of ShareGPT's lengths, one without). sun: decode fitted
    on concurrency 1 and 4 predicts 16, smaller decode pools, and skew (half a minute). Disagreements are listed.

    Parameters
    ----------
    paper
        The paper: afd, fastafd, prelude, spear or sun.
    trace
        spear: lengths of ShareGPT's conversations, turn by turn, to draw requests from; default: log-normal lengths of
        the same moments.
    quality
        sun, spear: train small models here, and compare the paper's claims about accuracy with them (decode modules
        that are shared and quantised; error compensators); needs the extra [live].
    full
        --quality at full size (hours), not the reduced one (about ten minutes on two idle cores). sun: models of 0.67
        million parameters and prompts of 8 digits. spear: language models of 4 million parameters.
    seeds
        --quality: seeds, each with a base model of its own; default: 3.
    data
        fastafd: folder with the measured ratio_sweep.csv and, if at hand, systems.csv.
    fit
        fastafd: ratios whose measured steps are fitted, such as 4,8,12,16 or 3:16; default: every second one of each
        curve.
    fit_prompts
        fastafd: prompt lengths whose steps are fitted, such as 16384,65536; default: all.
    fit_data
        fastafd: folder whose ratio_sweep.csv is fitted instead, so that everything in --data is predicted.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Parent of the run folders.
    jobs
        Processes; default: one for each core.
    fresh
        Start anew even if an unfinished run exists.
    """
    from twin.api.arguments import require_at_least
    from twin.api.drawing import illustrate
    from twin.cli.console import note, print_json, print_table
    from twin.cli.ratio_runs import run_folder, run_points
    from twin.cli.sweep import load_figures
    from twin.executors.processes import Processes, usable_cores
    from twin.reproductions.afd import reproduction as afd
    from workloads.errors import BadInput

    require_at_least("--jobs", jobs, 1)
    if trace is not None and paper != "spear":
        raise BadInput(f"expected it with spear only, found it with {paper}", field="--trace", value=str(trace))
    if quality:
        return _reproduce_quality(paper, full, seeds, jobs, runs, fresh=fresh, as_json=json)
    for option, chosen in (("--full", full or None), ("--seeds", seeds)):
        if chosen is not None:
            raise BadInput("expected it with --quality only", field=option, value=str(chosen))
    given = {"--data": data, "--fit": fit, "--fit-prompts": fit_prompts, "--fit-data": fit_data}
    if paper == "fastafd":
        return _reproduce_fastafd(data, fit, fit_prompts, fit_data, runs, as_json=json)
    for option, value in given.items():
        if value is not None:
            raise BadInput(f"expected it with fastafd only, found it with {paper}", field=option, value=str(value))
    if paper != "afd":
        return _reproduce_serving(paper, trace, runs, jobs, as_json=json)
    plan = afd.sweep()
    with run_folder(plan, f"reproduce-{paper}", runs, fresh=fresh, asked={"paper": paper}) as run:
        document = run_points(plan, run, Processes(jobs or usable_cores()), load_figures)
        afd.annotate(document)
        summary: dict[str, Any] = {
            "schema": "twin.reproduction/1",
            "paper": paper,
            "simulated": True,
            "optimal_ratios": afd.compare_ratios(),
            "claims": afd.claims(document),
            "run": document["run"],
            "sweep": document,
        }
        run.write_json("summary.json", summary)
        illustrate(document, run)
        run.set_status(True, "complete")
    if json:
        print_json(summary)
    else:
        from reports.reproductions.afd.table import reproduction_tables

        print_table(reproduction_tables(summary))
    note(f"run folder: {run.path}")
    return 0


def _reproduce_quality(
    paper: str, full: bool, seeds: int | None, jobs: int | None, runs: Path, *, fresh: bool, as_json: bool
) -> int:
    """Reproduce a paper's claims about accuracy on small models."""
    from twin.api.arguments import require_at_least
    from twin.cli.quality_runs import SEEDS, STUDIES, reproduce_quality
    from twin.executors.processes import usable_cores
    from workloads.errors import BadInput

    if paper not in STUDIES:
        raise BadInput(f"expected it with {' or '.join(STUDIES)} only, found it with {paper}", field="--quality")
    require_at_least("--seeds", seeds, 1)
    count = SEEDS if seeds is None else seeds
    processes = jobs or usable_cores()
    return reproduce_quality(paper, full=full, seeds=count, jobs=processes, runs=runs, fresh=fresh, as_json=as_json)


def _reproduce_serving(paper: str, trace: Path | None, runs: Path, jobs: int | None, *, as_json: bool) -> int:
    """Reproduce a paper on serving systems.

    `twin.reproductions.<paper>.reproduction` makes the document and `reports.reproductions.<paper>` shows it. SPEAR's
    `reproduce` takes the trace first.
    """
    from importlib import import_module

    from twin.cli.console import note
    from twin.executors.processes import usable_cores
    from workloads.traces import read_trace

    reproduction = import_module(f"twin.reproductions.{paper}.reproduction")
    asked: dict[str, Any] = {"paper": paper}
    lengths: list[Any] = []
    if paper == "spear":
        asked["trace"] = str(trace) if trace else None
        lengths = [read_trace(trace) if trace else None]  # before there is a run folder: the file may not be one
    return _keep_and_print(
        asked, runs, lambda: reproduction.reproduce(*lengths, jobs or usable_cores(), note), as_json=as_json
    )


def _reproduce_fastafd(
    data: Path | None, fit: str | None, fit_prompts: str | None, fit_data: Path | None, runs: Path, *, as_json: bool
) -> int:
    """Predict measured bundles; no run folder is left where the tables or the choice of steps cannot be used."""
    from twin.reproductions.fastafd.reproduction import FitChoice
    from twin.reproductions.fastafd.reproduction import reproduce as reproduce_steps

    document = reproduce_steps(data, FitChoice(fit, fit_prompts), fit_data)
    asked = {"paper": "fastafd", "data": str(data), **document["fit"]}
    return _keep_and_print(asked, runs, lambda: document, as_json=as_json)


def _keep_and_print(asked: dict[str, Any], runs: Path, compute: Callable[[], dict[str, Any]], *, as_json: bool) -> int:
    """Compute a reproduction's document in a run folder of its own, draw it there, and print it."""
    from importlib import import_module

    from reports.records.run_directory import open_run
    from twin.api.drawing import illustrate
    from twin.api.manifest import manifest
    from twin.cli.console import note, print_json, print_table

    paper = asked["paper"]
    with open_run(runs, f"reproduce-{paper}", "serving", manifest(asked), resume=False) as run:
        document = compute()
        document["run"] = {"id": run.id, "directory": str(run.path)}
        run.write_json("summary.json", document)
        illustrate(document, run)
        run.set_status(True, "complete")
    if as_json:
        print_json(document)
    else:
        print_table(import_module(f"reports.reproductions.{paper}.table").tables(document))
    note(f"run folder: {run.path}")
    return 0
