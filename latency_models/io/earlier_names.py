"""Earlier names of fields and values: files and `--set` that use them still read, with one note on stderr.

A section says its own in `Strict.renamed` and `Strict.renamed_values`; what is read and written carries present names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias, get_args

from latency_models.io.config_io import Strict
from latency_models.io.late_section import LateSection
from workloads.errors import BadInput

Notes = dict[str, str]
"""Replaced names: dotted earlier name, or field and earlier value, to the present one."""

Models: TypeAlias = tuple[type[Strict], ...]
"""The kinds of section that may stand at one place."""


def present_names(model: type[Strict], document: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """A copy of `document` in which fields and values have the names that `model` gives them now.

    Args:
        notes: what was renamed is added to it.

    Raises:
        BadInput: a section has a field under both of its names.
    """
    return _section((model,), document, "", notes)


def present_key(model: type[Strict], key: str, notes: Notes) -> str:
    """The dotted field `key` of `model` in present names."""
    models: Models = (model,)
    names: list[str] = []
    for name in key.split("."):
        names.append(_present(models, name))
        if any(names[-1] in each.model_fields for each in models):  # otherwise it tells an item of a list
            models = _fields(models, names[-1])
    present = ".".join(names)
    if present != key:
        notes[key] = present
    return present


def print_notes(notes: Notes) -> None:
    """Print the replaced names on stderr, in one line and once a process."""
    if notes:
        print_note("; ".join(f"{old} is now called {new}" for old, new in notes.items()))


@functools.cache  # a sweep reads its scenario many times
def print_note(text: str) -> None:
    """Print a line on stderr, the same one once a process."""
    print(f"twin: {text}", file=sys.stderr)


def _section(models: Models, section: Mapping[str, Any], prefix: str, notes: Notes) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in section.items():
        name = _present(models, key)
        field = f"{prefix}{name}"
        if name != key:
            if name in section:
                raise BadInput(f"expected {name} alone: {key} is its earlier name, and both are given", field=field)
            notes[f"{prefix}{key}"] = field
        result[name] = _value(_fields(models, name), _present_value(models, name, value, field, notes), field, notes)
    return result


def _value(models: Models, value: Any, field: str, notes: Notes) -> Any:
    """The value of a field with present names, also inside a section or a list of sections."""
    if not models:
        return value
    if isinstance(value, dict):
        return _section(models, value, f"{field}.", notes)
    if isinstance(value, list):
        return [_value(models, each, f"{field}[{i}]", notes) for i, each in enumerate(value)]
    return value


def _present(models: Models, name: str) -> str:
    return next((model.renamed[name] for model in models if name in model.renamed), name)


def _present_value(models: Models, name: str, value: Any, field: str, notes: Notes) -> Any:
    if not isinstance(value, str):
        return value
    for model in models:
        if (present := model.renamed_values.get(name, {}).get(value)) is not None:
            notes[f"{field}: {value}"] = present
            return present
    return value


@functools.lru_cache(maxsize=4096)  # sections and names that a sweep asks for in each of its points
def _fields(models: Models, name: str) -> Models:
    """The sections that may stand in field `name` of any of `models`."""
    found = [_sections(model.model_fields[name].annotation) for model in models if name in model.model_fields]
    return tuple(section for sections in found for section in sections)


def _sections(annotation: Any) -> list[type[Strict]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return [annotation]
    if isinstance(annotation, type) and issubclass(annotation, LateSection):
        return _sections(annotation.annotation())
    return [section for inner in get_args(annotation) for section in _sections(inner)]
