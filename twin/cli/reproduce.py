"""`twin reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

FLAG = Parameter(negative=())


def reproduce(
    paper: Literal["afd"],
    /,
    *,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
    jobs: int | None = None,
    fresh: Annotated[bool, FLAG] = False,
) -> int:
    """A paper's tables and figures, computed again beside what was printed.

    afd: the optimal ratios, and figures 4 to 7 by simulation (about a minute on two cores). What disagrees is said.

    Parameters
    ----------
    paper
        Which paper: afd.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Where run folders go.
    jobs
        Processes; default one a core.
    fresh
        Start anew even if an unfinished run is there.
    """
    from twin.cli.console import note, print_json, print_table, require_at_least
    from twin.cli.running import run_folder, run_points
    from twin.cli.sweep import illustrate, load_figures
    from twin.reproductions import afd

    require_at_least("--jobs", jobs, 1)
    plan = afd.sweep()
    with run_folder(plan, f"reproduce-{paper}", runs, fresh=fresh, asked={"paper": paper}) as run:
        document = run_points(plan, run, jobs, load_figures)
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
        from reports.afd.reproduction import reproduction_tables

        print_table(reproduction_tables(summary))
    note(f"run folder: {run.path}")
    return 0
