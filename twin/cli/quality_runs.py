"""`twin reproduce sun --quality`: trains small models with the live backend's room for it, in a resumable run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import BadInput

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory

SEEDS = 3


def reproduce_sun_quality(*, full: bool, seeds: int, jobs: int, runs: Path, fresh: bool, as_json: bool) -> int:
    """Train base models and adapt them to every task, in processes; a finished one is a point of the run.

    Raises:
        BadInput: torch is not installed.
    """
    try:
        from live.adaptation.sizes import SIZES
    except ImportError as error:
        raise BadInput(f"expected the extra [live] to be installed ({error})", field="--quality") from None
    from reports.records.run_directory import fingerprint, open_run
    from twin.api.drawing import illustrate
    from twin.api.manifest import manifest
    from twin.cli.console import note, print_json, print_table
    from twin.reproductions.sun.quality import summarise

    size = "full" if full else "reduced"
    settings = {"paper": "sun", "quality": True, "size": size, "sizes": asdict(SIZES[size]), "seeds": seeds}
    content = manifest(settings)
    identity = fingerprint([settings, content["version"]])
    with open_run(runs, "reproduce-sun-quality", identity, content, resume=not fresh) as run:
        bases, tasks = _train(run, size, seeds, jobs)
        document = summarise(asdict(SIZES[size]), bases, tasks)
        document["run"] = {"id": run.id, "directory": str(run.path)}
        run.write_json("summary.json", document)
        illustrate(document, run)
        run.set_status(True, "complete")
    if as_json:
        print_json(document)
    else:
        from reports.reproductions.sun.quality_table import tables

        print_table(tables(document))
    note(f"run folder: {run.path}")
    return 0


def _train(run: RunDirectory, size: str, seeds: int, jobs: int) -> tuple[list[Any], list[Any]]:
    """Rows of base models and of tasks, in the order of seeds and tasks. Base models stay in the run's folder."""
    from live.adaptation.comparison import TASKS, BaseJob, TaskJob
    from twin.cli.console import progress

    folders = [run.path / "models" / f"base-{seed}" for seed in range(seeds)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    bases = {f"base, seed {seed}": BaseJob(size, seed, folder) for seed, folder in enumerate(folders)}
    tasks = {
        f"{task}, seed {seed}": TaskJob(size, seed, task, folder)
        for seed, folder in enumerate(folders)
        for task in TASKS
    }
    done = run.points()
    with progress("training", len(bases) + len(tasks), len(done)) as advance:
        for group in (bases, tasks):
            _run_missing(run, group, done, jobs, advance)
    return [done[key] for key in bases], [done[key] for key in tasks]


def _run_missing(
    run: RunDirectory, group: dict[str, Any], done: dict[str, Any], jobs: int, advance: Callable[[str], None]
) -> None:
    """Run the jobs of a group that are not done; every result is kept at once."""
    from twin.sweeps.parallel import each_as_done

    missing = {job: key for key, job in group.items() if key not in done}
    with each_as_done(_run_job, list(missing), jobs) as results:
        for job, row in results:
            key = missing[job]
            run.add_point(key, dict(row))
            done[key] = row
            advance(key)


def _run_job(job: Any) -> dict[str, Any]:
    row: dict[str, Any] = job.run()
    return row
