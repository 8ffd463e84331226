"""Reads what lies beside a paper's program: published tables (CSV) and scenarios (YAML)."""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Any, TypeVar, get_type_hints

import yaml

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
