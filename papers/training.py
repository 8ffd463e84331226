"""Small models that are trained for a paper's claims about accuracy, in a run that can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from papers.data import Task
from twin.cli.console import progress
from twin.executors.processes import each_as_done

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory

Row = dict[str, Any]
Job = Callable[[str, int, Path], Row]
"""Computes a row for a size, a seed and the folder of the seed's model."""


def language_model_row(kind: str, seed: int, document: Mapping[str, Any]) -> Row:
    """The row of a language model, from the `training.json` of its training."""
    from live.adaptation.training import curve  # needs torch, as the training did

    return {
        "kind": kind,
        "seed": seed,
        "perplexity": document["perplexity"],
        "parameters": document["trained_parameters"],
        "corpus": document["corpus"],
        "losses": curve(document["losses"]),
    }


class Recipe(NamedTuple):
    """A model of each seed, trained into its folder (or taken up there), and what is compared on it."""

    name: str
    folder: str
    train: Job
    compare: Mapping[str, Job]


class Models(NamedTuple):
    """The jobs of one seed, by the names of their points: the model, then those that need it."""

    train: Task
    compare: Sequence[Task]


class Study(NamedTuple):
    """A paper's study on small models: sizes by name, recipes of a size, and the document of the resulting rows."""

    sizes: Mapping[str, Any]
    recipes: Callable[[str], Sequence[Recipe]]
    summarise: Callable[[Row, list[Row], list[Row]], Row]

    def train(self, run: RunDirectory, size: str, seeds: int, jobs: int) -> tuple[list[Row], list[Row]]:
        """Rows of models, and of what is compared on them, in order; every finished job is a point of the run."""
        models = [
            _models(recipe, size, seed, run.path / "models" / f"{recipe.folder}-{seed}")
            for recipe in self.recipes(size)
            for seed in range(seeds)
        ]
        names = [model.train.name for model in models], [task.name for model in models for task in model.compare]
        rows = run.points()
        with progress("training", sum(map(len, names)), len(rows)) as advance:
            for wave in waves(models, jobs):
                _run_missing(run, wave, rows, jobs, advance)
        trained, compared = ([rows[name] for name in model] for model in names)
        return trained, compared


def _models(recipe: Recipe, size: str, seed: int, folder: Path) -> Models:
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (size, seed, folder)
    compare = [Task(f"{name}, seed {seed}", job, arguments) for name, job in recipe.compare.items()]
    return Models(Task(f"{recipe.name}, seed {seed}", recipe.train, arguments), compare)


def waves(models: Sequence[Models], jobs: int) -> list[list[Task]]:
    """Jobs that may run together, wave by wave: no processor waits for the last of an odd number of models."""
    first, later = models[:jobs], models[jobs:]
    return [
        [model.train for model in first],
        [model.train for model in later] + [task for model in first for task in model.compare],
        [task for model in later for task in model.compare],
    ]


def _run_missing(
    run: RunDirectory, tasks: Iterable[Task], rows: dict[str, Any], jobs: int, advance: Callable[[str], None]
) -> None:
    missing = [task for task in tasks if task.name not in rows]
    with each_as_done(Task.run, missing, jobs) as results:
        for task, row in results:
            run.add_point(task.name, dict(row))
            rows[task.name] = row
            advance(task.name)
