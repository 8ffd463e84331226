"""Data of a paper: its published tables (CSV), its scenarios (YAML), and its independent tasks."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar, get_type_hints

import yaml

from twin.executors.processes import each_as_done

T = TypeVar("T")


def published(paper: str, name: str) -> list[dict[str, str]]:
    text = (files("papers") / paper / "data" / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def records(kind: type[T], paper: str, name: str, **columns: str) -> list[T]:
    """The rows of a published table as dataclasses, by `columns` where names differ; `…_ms` is read as seconds."""
    types = get_type_hints(kind)
    fields = [(field, columns.get(field, field)) for field in types]
    return [
        kind(**{field: _value(row[column], types[field], column) for field, column in fields})
        for row in published(paper, name)
    ]


def _value(text: str, kind: Any, column: str) -> Any:
    if kind == float | None:
        return float(text) if text else None
    return kind(text) / 1e3 if column.endswith("_ms") else kind(text)


def scenario(paper: str, name: str = "scenario") -> dict[str, Any]:
    """A scenario document, to be completed or changed by its program."""
    text = (files("papers") / paper / f"{name}.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


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
    with each_as_done(Task.run, tasks, jobs) as pairs:
        for task, result in pairs:
            results[task] = result
            progress(f"{task.name} ({len(results)} of {len(tasks)})")
    return [results[task] for task in tasks]
