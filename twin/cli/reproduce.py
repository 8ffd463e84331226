"""`twin reproduce`: computes a paper's tables and figures again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reports.run_directory import fingerprint, open_run
from twin.cli.console import Flag, Fresh, Json, note, print_run
from workloads.errors import BadInput, missing_extra

if TYPE_CHECKING:
    from reports.blocks import Document


def reproduce(
    paper: Literal["afd", "fastafd", "prelude", "spear", "sun"],
    /,
    *,
    trace: Path | None = None,
    quality: Flag = False,
    full: Flag = False,
    seeds: int | None = None,
    data: Path | None = None,
    fit: str | None = None,
    fit_prompts: str | None = None,
    fit_data: Path | None = None,
    json: Json = False,
    runs: Path = Path("runs"),
    jobs: int | None = None,
    fresh: Fresh = False,
) -> int:
    """Compute a paper's tables and figures again, beside the published values.

    afd: the optimal ratios, and figures 4 to 7 by simulation (about a minute on two cores); with --trace, figure 3 on
    it (seconds). fastafd: decode steps of real bundles over the ratio, predicted from part of them (seconds; needs
    --data). prelude: execution classes, prefix-led planning, and the serving tables (about a minute). spear:
    SLO-constrained chunks beside static ones, with tables that the static rows imply (two minutes with a trace of
    ShareGPT's lengths, one without). sun: decode fitted on concurrency 1 and 4 predicts 16, smaller decode pools, and
    skew (half a minute). Disagreements are listed.

    Args:
        paper: The paper: afd, fastafd, prelude, spear or sun.
        trace: afd: any trace, whose answers are tested for geometric lengths. spear: lengths of ShareGPT's
            conversations, turn by turn, to draw requests from; default: log-normal lengths of the same moments.
        quality: sun, spear: train small models here, and compare the paper's claims about accuracy with them (decode
            modules that are shared and quantised; error compensators); needs the extra [live].
        full: --quality at full size (hours), not the reduced one (about ten minutes on two idle cores). sun: models of
            0.67 million parameters and prompts of 8 digits. spear: language models of 4 million parameters.
        seeds: --quality: seeds, each with a base model of its own; default: 3.
        data: fastafd: folder with the measured ratio_sweep.csv and, if at hand, systems.csv.
        fit: fastafd: ratios whose measured steps are fitted, such as 4,8,12,16 or 3:16; default: every second one of
            each curve.
        fit_prompts: fastafd: prompt lengths whose steps are fitted, such as 16384,65536; default: all.
        fit_data: fastafd: folder whose ratio_sweep.csv is fitted instead, so that everything in --data is predicted.
        runs: Parent of the run folders.
        jobs: Processes; default: one for each core.
    """
    from twin.api.inputs import require_at_least
    from twin.api.run_folder import complete, manifest
    from twin.process import usable_cores

    require_at_least("--jobs", jobs, 1)
    options = {
        "--trace": trace,
        "--quality": quality or None,
        "--full": full or None,
        "--seeds": seeds,
        "--data": data,
        "--fit": fit,
        "--fit-prompts": fit_prompts,
        "--fit-data": fit_data,
    }
    _check_options(paper, options)
    require_at_least("--seeds", seeds, 1)
    count = jobs or usable_cores()
    if paper == "afd" and trace is None:
        document = _sweep(runs, count, fresh=fresh)
    elif quality:
        document = _study(paper, "full" if full else "reduced", seeds or SEEDS, count, runs, fresh=fresh)
    else:
        settings, compute = _computation(paper, count, options)
        content = manifest({"paper": paper, **settings})
        with open_run(runs, f"reproduce-{paper}", "serving", content, resume=False) as run:
            document = complete(run, compute(), figures=True)
    program = import_module(f"papers.{paper}.{'quality' if quality else 'reproduction'}")
    print_run(document, program.tables, as_json=json)
    return 0


SEEDS = 3
"""Seeds of small models unless `--seeds` says otherwise."""

PAPERS_BY_OPTION: dict[str, tuple[str, ...]] = {
    "--trace": ("afd", "spear"),
    **dict.fromkeys(("--quality", "--full", "--seeds"), ("sun", "spear")),
    **dict.fromkeys(("--data", "--fit", "--fit-prompts", "--fit-data"), ("fastafd",)),
}
"""The papers that read an option."""


def _check_options(paper: str, values: dict[str, Any]) -> None:
    for option, value in values.items():
        if value is None:
            continue
        text, papers = None if option == "--quality" else str(value), PAPERS_BY_OPTION[option]
        expected = ""
        if option in ("--full", "--seeds") and not values["--quality"]:
            expected = "expected it with --quality only"
        elif paper not in papers:
            expected = f"expected it with {' or '.join(papers)} only, found it with {paper}"
        if expected:
            raise BadInput(expected, field=option, value=text)


def _study(paper: str, size: str, seeds: int, jobs: int, runs: Path, *, fresh: bool) -> Document:
    """Reproduce a paper's claims about accuracy on small models that are trained here, in a run that is resumed."""
    from twin.api.run_folder import complete, manifest

    try:
        study = import_module(f"papers.{paper}.training").STUDY
    except ImportError as error:
        raise missing_extra("live", error, field="--quality") from None
    sizes = asdict(study.sizes[size])
    settings = {"paper": paper, "quality": True, "size": size, "sizes": sizes, "seeds": seeds}
    content = manifest(settings)
    identity = fingerprint([settings, content["version"]])
    with open_run(runs, f"reproduce-{paper}-quality", identity, content, resume=not fresh) as run:
        return complete(run, study.summarise(sizes, *study.train(run, size, seeds, jobs)), figures=True)


def _sweep(runs: Path, jobs: int, *, fresh: bool) -> Document:
    """AFD's figures 4 to 7, in a run that is resumed."""
    from papers.afd import reproduction as afd
    from twin.api.run_folder import complete
    from twin.cli.runs import open_sweep, simulate_missing
    from twin.executors.executor import Processes

    plan = afd.sweep()
    with open_sweep(plan, "reproduce-afd", runs, {"paper": "afd"}, fresh=fresh) as run:
        sweep = plan.summarise(simulate_missing(plan, run, Processes(jobs), figures=True))
        sweep["run"] = {"id": run.id, "directory": str(run.path)}
        return complete(run, afd.document(sweep), figures=True)


def _computation(paper: str, jobs: int, options: dict[str, Any]) -> tuple[Document, Callable[[], Document]]:
    """The settings that the manifest keeps, and the program. Input files are read here: they may be unusable."""
    program, trace = import_module(f"papers.{paper}.reproduction"), options["--trace"]
    if paper == "afd":
        lengths = program.reproduce(trace)
        return {"trace": str(trace)}, lambda: lengths
    if paper == "fastafd":
        choice = program.FitChoice(options["--fit"], options["--fit-prompts"])
        steps = program.reproduce(options["--data"], choice, options["--fit-data"])
        return {"data": str(options["--data"]), **steps["fit"]}, lambda: steps
    if paper == "spear":
        from workloads.traces import read_trace

        conversations = read_trace(trace) if trace else None
        return {"trace": str(trace) if trace else None}, lambda: program.reproduce(conversations, jobs, note)
    return {}, lambda: program.reproduce(jobs, note)
