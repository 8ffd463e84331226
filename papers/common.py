"""Parts that the papers' programs share: published tables, scenarios, texts and claims, tasks, and small trainings."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

import yaml
from pydantic import TypeAdapter

from latency_models.fitting.estimator import student_quantile
from reports.blocks import Cells, Document, Section, Table, Text, bullets, rows_table, table
from twin.cli.console import progress
from twin.executors.executor import Processes

if TYPE_CHECKING:
    from reports.run_directory import RunDirectory


T = TypeVar("T")


def published(paper: str, name: str) -> list[dict[str, str]]:
    text = (files("papers") / paper / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def records(kind: type[T], paper: str, name: str, **columns: str) -> list[T]:
    """The rows of a published table as dataclasses, by `columns` where names differ; `…_ms` is read as seconds."""
    types = get_type_hints(kind)
    fields = [(field, columns.get(field, field)) for field in types]
    return [
        kind(**{field: _value(row.get(column, ""), types[field], column) for field, column in fields})
        for row in published(paper, name)
    ]


def _value(text: str, kind: Any, column: str) -> Any:
    if kind == float | None:
        return _value(text, float, column) if text else None
    return kind(text) / 1e3 if column.endswith("_ms") else kind(text)


def scenario(paper: str, name: str = "scenario") -> Document:
    """A scenario document, to be completed or changed by its program."""
    text = (files("papers") / paper / f"{name}.yaml").read_text(encoding="utf-8")
    document: Document = yaml.safe_load(text)
    return document


# -- what is said of a paper -------------------------------------------------------------------------------------------


Claim = Document


class Wording:
    """Claims, tables and notes of a paper, which `NAME.yaml` words as format strings of `reports.blocks.Cells`."""

    def __init__(self, paper: str, name: str = "report") -> None:
        self.texts = scenario(paper, name)

    def claim(self, key: str, agrees: bool, more: Document = {}, /, **values: Any) -> Claim:  # noqa: B006 (read only)
        """A claim as it is in a document: where the paper makes it, what is printed and found, whether that agrees.

        `more` is for the document alone.
        """
        texts = self.texts["claims"][key]
        where, what, printed, result, note = (
            fill(texts.get(part, ""), values) for part in ("where", "what", "published", "found", "note")
        )
        ends = {"agrees": bool(agrees), "note": note}
        return {"where": where, "what": what, "published": printed, "found": result, **more, **ends}

    def table(self, key: str, rows: Iterable[Document]) -> Table:
        """A row for each document."""
        return rows_table(self.texts["tables"][key]["titles"], self.texts["tables"][key]["cells"], rows)

    def title(self, key: str, **values: Any) -> str:
        return fill(self.texts["tables"][key]["title"], values)

    def section(self, key: str, rows: Iterable[Document], **values: Any) -> Section:
        """A table under its title, which `values` fill in."""
        return self.title(key, **values), self.table(key, rows)

    def notes(self, **values: Any) -> list[str]:
        return [fill(text, values) for text in self.texts["notes"]]


def fill(text: str, values: Mapping[str, Any]) -> str:
    return Cells().vformat(text, (), values)


def ends(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest."""
    numbers = list(values)
    return min(numbers), max(numbers)


def claims_table(claims: Iterable[Claim], columns: dict[str, Callable[[Claim], str]] | None = None) -> Table:
    """All claims, one a row, with further columns by their titles."""
    columns = columns or {}
    rows = table("claim", "where", "published", "found", *columns, "holds")
    for row in claims:
        cells = [cell(row) for cell in columns.values()]
        rows.add_row(
            row["what"], row["where"], row["published"], row["found"], *cells, "yes" if row["agrees"] else "no"
        )
    return rows


def conclusion(document: Document) -> list[Section]:
    """The claims that the results contradict, one a line, or `nothing`; and the notes."""
    lines = [
        f"{row['where']}, {row['what']}: {row['published']} printed, {row['found']} found"
        + (f"; {row['note']}" if row["note"] else "")
        for row in document["claims"]
        if not row["agrees"]
    ]
    contradicted: Section = ("What disagrees", bullets(lines) if lines else Text("nothing"))
    return [contradicted, *([("Notes", bullets(document["notes"]))] if "notes" in document else [])]


# -- figures -----------------------------------------------------------------------------------------------------------


def curve(axes: Any, rows: Sequence[Document], x: str, y: str, style: str, scale: float = 1, **options: Any) -> None:
    """Plot a field of rows over another; `y` is multiplied by `scale`."""
    axes.plot([row[x] for row in rows], [scale * row[y] for row in rows], style, **options)


def title(axes: Any, text: str, fontsize: int = 10, **settings: Any) -> None:
    """Give axes a title at their left, and settings of matplotlib."""
    axes.set(**settings)
    axes.set_title(text, loc="left", fontsize=fontsize)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Task:
    """A function of a module with its arguments, and a name for progress."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> Any:
        return self.function(*self.arguments)


def run_tasks(tasks: Sequence[Task], jobs: int, progress: Callable[[str], None]) -> list[Any]:
    """The tasks' results, in the order of the tasks; `progress` is called with every task that ends."""
    results: dict[Task, Any] = {}
    with Processes(jobs).each_as_done(Task.run, tasks) as pairs:
        for task, result in pairs:
            results[task] = result
            progress(f"{task.name} ({len(results)} of {len(tasks)})")
    return [results[task] for task in tasks]


CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = student_quantile(CONFIDENCE, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def reaches(values: Sequence[float], limit: float, *, at_most: bool = False, strict: bool = False) -> bool:
    """True if the mean of values, one a seed, reaches a limit; `strict`: if their whole interval is beyond it."""
    span = interval(values) if strict else None
    worst = span[at_most] if span else mean(values)
    margin = limit - worst if at_most else worst - limit
    return margin > 0 if strict else margin >= 0


# -- small models ------------------------------------------------------------------------------------------------------


def study_sizes(kind: type[T], paper: str, **models: Mapping[str, Any]) -> dict[str, T]:
    """The sizes of a study by their names, of `sizes.yaml`; fields in `models` are those of the same name."""
    return {
        name: TypeAdapter(kind).validate_python(size | {field: sizes[name] for field, sizes in models.items()})
        for name, size in scenario(paper, "sizes").items()
    }


Row = Document
Job = Callable[[str, int, Path], Row]
"""Computes a row for a size, a seed and the folder of the seed's model."""


def step_shares(losses: Sequence[float]) -> list[float]:
    """The middles of the equal parts of a training that `losses` are means over, in shares of its steps."""
    return [(index + 0.5) / len(losses) for index in range(len(losses))]


def language_model_row(kind: str, seed: int, document: Mapping[str, Any]) -> Row:
    """The row of a language model, from the `training.json` of its training."""
    from live.adaptation.training import curve as loss_curve  # needs torch, as the training did

    return {
        "kind": kind,
        "seed": seed,
        "perplexity": document["perplexity"],
        "parameters": document["trained_parameters"],
        "corpus": document["corpus"],
        "losses": loss_curve(document["losses"]),
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
                missing = [task for task in wave if task.name not in rows]
                with Processes(jobs).each_as_done(Task.run, missing) as results:
                    for task, row in results:
                        run.add_point(task.name, dict(row))
                        rows[task.name] = row
                        advance(task.name)
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
