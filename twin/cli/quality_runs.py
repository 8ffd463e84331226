"""`twin reproduce sun --quality` and `spear --quality`: train small models in a resumable run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.errors import missing_extra

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory

SEEDS = 3


class ModelJobs(NamedTuple):
    """A model to train, with the jobs that need it.

    Attributes:
        name: of the model's point in the run. model: its job. dependants: jobs by the names of their points.
    """

    name: str
    model: Any
    dependants: Mapping[str, Any]


class Study(NamedTuple):
    """A paper's study on small models.

    Attributes:
        sizes: by name, reduced and full. train: trains in a run, for a size, seeds and processes; its rows are those of
            models and of what is compared. summarise: the document of a size and these rows. tables: for people.
    """

    sizes: Mapping[str, Any]
    train: Callable[[RunDirectory, str, int, int], tuple[list[Any], list[Any]]]
    summarise: Callable[[dict[str, Any], list[Any], list[Any]], dict[str, Any]]
    tables: Callable[[dict[str, Any]], Any]


def reproduce_quality(paper: str, *, full: bool, seeds: int, jobs: int, runs: Path, fresh: bool, as_json: bool) -> int:
    """Train and compare small models, in processes; a finished job is a point of the run.

    Raises:
        BadInput: torch is not installed.
    """
    try:
        study = STUDIES[paper]()
    except ImportError as error:
        raise missing_extra("live", error, field="--quality") from None
    from reports.records.run_directory import fingerprint, open_run
    from twin.api.drawing import illustrate
    from twin.api.manifest import manifest
    from twin.cli.console import note, print_json, print_table

    size = "full" if full else "reduced"
    sizes = asdict(study.sizes[size])
    settings = {"paper": paper, "quality": True, "size": size, "sizes": sizes, "seeds": seeds}
    content = manifest(settings)
    identity = fingerprint([settings, content["version"]])
    with open_run(runs, f"reproduce-{paper}-quality", identity, content, resume=not fresh) as run:
        document = study.summarise(sizes, *study.train(run, size, seeds, jobs))
        document["run"] = {"id": run.id, "directory": str(run.path)}
        run.write_json("summary.json", document)
        illustrate(document, run)
        run.set_status(True, "complete")
    if as_json:
        print_json(document)
    else:
        print_table(study.tables(document))
    note(f"run folder: {run.path}")
    return 0


def _sun() -> Study:
    from live.adaptation.study import STUDY_SIZES
    from reports.reproductions.sun.quality_table import tables
    from twin.reproductions.sun.quality import summarise

    return Study(STUDY_SIZES, _train_sun, summarise, tables)


def _spear() -> Study:
    from live.adaptation.compensation.sizes import STUDY_SIZES
    from reports.reproductions.spear.quality_table import tables
    from twin.reproductions.spear.quality import summarise

    return Study(STUDY_SIZES, _train_spear, summarise, tables)


STUDIES: dict[str, Callable[[], Study]] = {"sun": _sun, "spear": _spear}
"""By paper; a study is imported when it is wanted."""


def _train_spear(run: RunDirectory, size: str, seeds: int, jobs: int) -> tuple[list[Any], list[Any]]:
    """Rows of language models and of cells, in the order of seeds and cells. Models stay in the run's folder."""
    from live.adaptation.compensation.sizes import STUDY_SIZES
    from live.adaptation.compensation.study import CellJob, ModelJob

    models = _by_seed(
        run, seeds, "base", "base",
        lambda seed, folder: ModelJob(size, seed, folder),
        lambda seed, folder: {cell.name: CellJob(size, seed, cell, folder) for cell in STUDY_SIZES[size].cells},
    )  # fmt: skip
    return _run_all(run, models, jobs)


def _train_sun(run: RunDirectory, size: str, seeds: int, jobs: int) -> tuple[list[Any], list[Any]]:
    """Rows of base models and of tasks, in the order of seeds and tasks. Base models stay in the run's folder."""
    from live.adaptation.study import TASKS, TEXT_TASKS, BaseJob, TaskJob, TextBaseJob, TextTaskJob

    operations = _by_seed(
        run, seeds, "base", "base",
        lambda seed, folder: BaseJob(size, seed, folder),
        lambda seed, folder: {task: TaskJob(size, seed, task, folder) for task in TASKS},
    )  # fmt: skip
    texts = _by_seed(
        run, seeds, "text base", "text",
        lambda seed, folder: TextBaseJob(size, seed, folder),
        lambda seed, folder: {task: TextTaskJob(size, seed, task, folder) for task in TEXT_TASKS},
    )  # fmt: skip
    return _run_all(run, operations + texts, jobs)


def _by_seed(
    run: RunDirectory,
    seeds: int,
    name: str,
    kind: str,
    model: Callable[[int, Path], Any],
    dependants: Callable[[int, Path], Mapping[str, Any]],
) -> list[ModelJobs]:
    """The jobs of every seed, whose model's folder is made; points are named after their seed.

    Args:
        name: of models' points. kind: of models' folders. model, dependants: the jobs of a seed and a folder.
    """
    made = []
    for seed in range(seeds):
        folder = run.path / "models" / f"{kind}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        named = {f"{key}, seed {seed}": job for key, job in dependants(seed, folder).items()}
        made.append(ModelJobs(f"{name}, seed {seed}", model(seed, folder), named))
    return made


def _run_all(run: RunDirectory, models: Sequence[ModelJobs], jobs: int) -> tuple[list[Any], list[Any]]:
    """Run the jobs of all models; returns the rows of models, and of what is compared on them, in order."""
    from twin.cli.console import progress

    done = run.points()
    keys = [each.name for each in models], [key for each in models for key in each.dependants]
    with progress("training", sum(map(len, keys)), len(done)) as advance:
        for group in waves(models, jobs):
            _run_missing(run, group, done, jobs, advance)
    bases, compared = ([done[key] for key in each] for each in keys)
    return bases, compared


def waves(models: Sequence[ModelJobs], jobs: int) -> list[dict[str, Any]]:
    """Jobs that may run together, wave by wave: no processor waits for the last of an odd number of models."""
    first, rest = models[:jobs], models[jobs:]
    return [
        {each.name: each.model for each in first},
        {each.name: each.model for each in rest} | {key: job for each in first for key, job in each.dependants.items()},
        {key: job for each in rest for key, job in each.dependants.items()},
    ]


def _run_missing(
    run: RunDirectory, group: dict[str, Any], done: dict[str, Any], jobs: int, advance: Callable[[str], None]
) -> None:
    """Run the jobs of a group that are not done; every result is kept at once."""
    from twin.executors.processes import each_as_done

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
