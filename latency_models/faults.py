"""From what pydantic reports to the one line that a user reads: file, dotted field, value found, what was expected."""

from __future__ import annotations

import difflib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from workloads.errors import BadInput

_EXPECTED = {
    "missing": "expected this field, which is missing",
    "model_type": "expected a section of fields",
    "model_attributes_type": "expected a section of fields",
    "dict_type": "expected a section of fields",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "string_type": "expected text",
    "invalid_key": "expected field names that are text",
    "float_type": "expected a number",
    "int_type": "expected a whole number",
    "bool_type": "expected true or false",
    "date_type": "expected a date such as 2026-01-31",
    "greater_than": "expected a number above {gt}",
    "greater_than_equal": "expected a number of at least {ge}",
    "less_than": "expected a number below {lt}",
    "less_than_equal": "expected a number of at most {le}",
    "string_too_short": "expected text, not less than {min_length} characters",
    "too_short": "expected at least {min_length} items, found {actual_length}",
    "too_long": "expected at most {max_length} items, found {actual_length}",
    "literal_error": "expected {expected}",
    "union_tag_invalid": "expected one of {expected_tags}",
    "union_tag_not_found": "expected this field, which is missing",
}
"""By pydantic's type of error; names in braces are its context. Others keep pydantic's own words."""


def explain_validation(
    error: ValidationError, file: Path | None, model: type[BaseModel] | None = None, *, section: str = ""
) -> BadInput:
    """The first fault as one line, and in how many other fields there are more.

    Misspelt fields come before missing ones, since the one is mostly the cause of the other. A validator that raises
    `BadInput` with a `field` names a field below the section that it validates.

    Args:
        file: the file that was read.
        model: what was being checked; with it, members of unions do not appear in the dotted field, and an unknown
            field is answered with the nearest known one of the same section.
        section: dotted field under which the checked document stands in the file.
    """
    faults = sorted(error.errors(include_url=False), key=_rank)
    told = [_tell(fault, model, section) for fault in faults]
    field, value, expected = told[0]
    others = {other for other, _, _ in told} - {field}
    if others:
        expected += f" (and {len(others)} more)"
    return BadInput(expected, value=value, field=field or None, file=file)


def _rank(fault: ErrorDetails) -> int:
    """Sorts unknown fields first, and last the complaint of a union's scalar member about a section."""
    if fault["type"] == "extra_forbidden":
        return 0
    return 2 if fault["type"].endswith("_type") and isinstance(fault["input"], dict) else 1


def _tell(fault: ErrorDetails, model: type[BaseModel] | None, section: str) -> tuple[str, Any, str]:
    """Dotted field, value found (None: not worth showing) and what was expected."""
    names, siblings = _place(fault["loc"], model)
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, BadInput):
        names += [cause.field] if cause.field else []
        return _dotted(section, names), cause.value, cause.expected
    if kind.startswith("union_tag"):
        names.append(context["discriminator"].strip("'"))
        value = context.get("tag")
    if kind in ("missing", "extra_forbidden") or isinstance(value, dict | BaseModel) or not _can_be_shown(value):
        value = None
    return _dotted(section, names), value, _expectation(fault, siblings)


def _can_be_shown(value: object) -> bool:
    try:
        repr(value)
    except RecursionError:  # a list nested a thousand deep
        return False
    return True


def _expectation(fault: ErrorDetails, siblings: list[str]) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown field" + _suggestion(str(fault["loc"][-1]), siblings)
    if kind == "string_type" and fault["loc"][-1:] == ("[key]",):
        return _EXPECTED["invalid_key"]
    if kind in _EXPECTED:
        told = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
        expected = _EXPECTED[kind].format(**told)
    else:
        expected = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{expected}, found nothing" if fault["input"] is None and kind != "missing" else expected


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f", did you mean {close[0]}?"
    return f", expected one of {', '.join(known)}" if known else ""


def _dotted(section: str, names: list[str]) -> str:
    return ".".join(part for part in (section, *names) if part).replace(".[", "[")


def _place(loc: tuple[int | str, ...], model: type[BaseModel] | None) -> tuple[list[str], list[str]]:
    """The parts of `loc` that a user wrote, and the fields that may stand where the last of them does.

    Pydantic puts the tried member of a union among the parts; following the types of `model` tells it from a field.
    """
    here = [] if model is None else _members(model)
    names: list[str] = []
    siblings: list[str] = []
    for part in loc:
        variants = [kind for kind in here if len(here) > 1 and _is_called(kind, part)]
        if variants:
            here = variants
            continue
        if part == "[key]":
            continue
        in_list = isinstance(part, int) and not any(get_origin(kind) is dict for kind in here)
        names.append(f"[{part}]" if in_list else str(part))
        siblings = [name for kind in here for name in _fields(kind)]
        here = [inner for kind in here for inner in _inside(kind, part)]
    return names, siblings


def _members(annotation: Any) -> list[Any]:
    """The alternatives of an annotation: the members of a union, or itself alone."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member) if inner is not type(None)]
    return [annotation]


def _is_called(kind: Any, part: int | str) -> bool:
    """Whether pydantic calls this member of a union `part`: by a tag, or by the name of its type."""
    if _is_model(kind):
        tags = [tag for field in kind.model_fields.values() for tag in _literals(field.annotation)]
        return part == kind.__name__ or part in tags
    return part == getattr(kind, "__name__", None) or part == str(kind)


def _literals(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _fields(kind: Any) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_model(kind) else []


def _inside(kind: Any, part: int | str) -> list[Any]:
    """The alternatives one step below a type: at a field, at a key, or at a place in a list."""
    if _is_model(kind):
        return [
            inner
            for name, field in kind.model_fields.items()
            if part == (field.alias or name)
            for inner in _members(field.annotation)
        ]
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        return _members(arguments[1])
    return _members(arguments[0]) if get_origin(kind) in (list, tuple) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
