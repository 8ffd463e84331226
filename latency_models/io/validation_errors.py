"""One-line messages from pydantic errors: file, dotted field, value, and what was expected."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

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
"""Expectations by pydantic's type of error, with its context in braces. Other types keep pydantic's own words."""


_Loc: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class _Fault:
    """One of pydantic's errors: the names that a user wrote, the fields allowed beside the last, and unions tried."""

    details: ErrorDetails
    names: tuple[str, ...]
    siblings: list[str]
    choices: tuple[tuple[_Loc, str], ...]


def explain_validation(
    error: ValidationError, file: Path | None, model: type[BaseModel] | None = None, *, section: str = ""
) -> BadInput:
    """The first error as one line, with the number of other fields that have errors.

    Misspelt fields come before missing ones, since a misspelling usually causes the missing field. A `BadInput` with a
    `field` names one below its section. Of a union, only the members closest to the value are reported. With `model`,
    the dotted field leaves out members of unions, and an unknown field is answered with the nearest known one.
    """
    faults = _closest_only([_placed(details, model) for details in error.errors(include_url=False)])
    messages = [
        _describe(fault, section)
        for fault in sorted(faults, key=lambda fault: fault.details["type"] != "extra_forbidden")
    ]
    field, value, expected = messages[0]
    for text in dict.fromkeys(text for name, _, text in messages if name == field and text != expected):
        expected += f" or {text.removeprefix('expected ')}"
    extra = {name for name, _, _ in messages} - {field}
    if extra:
        expected += f" (and {len(extra)} more)"
    return BadInput(expected, value=value, field=field or None, file=file)


def _closest_only(faults: list[_Fault]) -> list[_Fault]:
    """The errors without those of union members that complain more about the value as a whole, or inside."""
    alternatives: dict[_Loc, dict[str, list[_Fault]]] = defaultdict(lambda: defaultdict(list))
    for fault in faults:
        for place, member in fault.choices:
            alternatives[place][member].append(fault)
    farther: set[tuple[_Loc, str]] = set()
    for place, members in alternatives.items():
        distances = {member: _distance(place, member_faults) for member, member_faults in members.items()}
        nearest = min(distances.values())
        closest = [member for member, distance in distances.items() if distance == nearest]
        keep = closest if nearest[0] else closest[:1]
        farther |= {(place, member) for member in members if member not in keep}
    return [fault for fault in faults if farther.isdisjoint(fault.choices)]


def _distance(place: _Loc, faults: list[_Fault]) -> tuple[bool, int]:
    """Distance of a union member: whether the value is of another kind, and the number of errors."""
    of_the_whole = (fault.details["type"] for fault in faults if len(fault.details["loc"]) == len(place) + 1)
    return any(kind == "literal_error" or kind.endswith("_type") for kind in of_the_whole), len(faults)


def _describe(fault: _Fault, section: str) -> tuple[str, Any, str]:
    """Dotted field, value (None if it is not worth showing), and what was expected."""
    details, names = fault.details, list(fault.names)
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, BadInput):
        names += [cause.field] if cause.field else []
        return _dotted(section, names), cause.value, cause.expected
    if kind.startswith("union_tag"):
        names.append(context["discriminator"].strip("'"))
        value = context.get("tag")
    if kind in ("missing", "extra_forbidden") or isinstance(value, dict | BaseModel) or not _can_be_shown(value):
        value = None
    return _dotted(section, names), value, _expectation(details, fault.siblings)


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
        values = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
        expected = _EXPECTED[kind].format(**values)
    else:
        expected = fault["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{expected}, found nothing" if fault["input"] is None and kind != "missing" else expected


def _suggestion(name: str, names: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f", did you mean {close[0]}?"
    return f", expected one of {', '.join(names)}" if names else ""


def _dotted(section: str, names: list[str]) -> str:
    return ".".join(part for part in (section, *names) if part).replace(".[", "[")


def _placed(details: ErrorDetails, model: type[BaseModel] | None) -> _Fault:
    """Locate an error by following the types of `model` along pydantic's location, which names members of unions."""
    kinds = [] if model is None else [_plain(model)]
    names: list[str] = []
    siblings: list[str] = []
    choices: list[tuple[_Loc, str]] = []
    for at, part in enumerate(details["loc"]):
        members = [member for kind in kinds for member in _members(kind)]
        if members:
            choices.append((details["loc"][:at], str(part)))
            kinds = [_plain(member) for member in _called(members, str(part))]
            continue
        if part == "[key]":
            continue
        in_list = isinstance(part, int) and not any(get_origin(kind) is dict for kind in kinds)
        names.append(f"[{part}]" if in_list else str(part))
        siblings = [name for kind in kinds for name in _fields(kind)]
        kinds = [_plain(inner) for kind in kinds for inner in _inside(kind, part)]
    return _Fault(details, tuple(names), siblings, tuple(choices))


def _plain(annotation: Any) -> Any:
    """An annotation without the parts that pydantic does not name: metadata, and None."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    members = _members(annotation)
    return _plain(members[0]) if len(members) == 1 else annotation


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) not in (Union, UnionType):
        return []
    return [member for member in get_args(annotation) if member is not NoneType]


def _called(members: list[Any], name: str) -> list[Any]:
    """The members that pydantic may mean by `name`: a tag, or a description with the names of the types in it."""
    tagged = [member for member in members if name in _tags(_plain(member))]
    if tagged:
        return tagged
    words = set(re.findall(r"\w+", name))
    candidates = [(member, _words(member)) for member in members]
    longest = max((len(types) for _, types in candidates if types <= words), default=-1)
    return [member for member, types in candidates if types <= words and len(types) == longest] or members


def _tags(kind: Any) -> list[Any]:
    annotations = [field.annotation for field in kind.model_fields.values()] if _is_model(kind) else []
    return [tag for annotation in annotations if get_origin(annotation) is Literal for tag in get_args(annotation)]


def _words(annotation: Any) -> set[str]:
    """Names of the types in an annotation, as they stand in pydantic's description of it."""
    kind, origin = _plain(annotation), get_origin(_plain(annotation))
    if origin is Literal:
        return {"literal"}
    inner = [word for argument in get_args(kind) if argument is not Ellipsis for word in _words(argument)]
    outer = [] if origin in (Union, UnionType) else [getattr(origin or kind, "__name__", str(kind))]
    return {*outer, *inner}


def _fields(kind: Any) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_model(kind) else []


def _inside(kind: Any, part: int | str) -> list[Any]:
    """The annotation one step below a type: at a field, at a key, or at a place in a list. None if there is none."""
    if _is_model(kind):
        fields = kind.model_fields.items()
        return [field.annotation for name, field in fields if part == (field.alias or name)]
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is dict:
        return [arguments[1]]
    if origin is tuple and isinstance(part, int) and arguments[-1] is not Ellipsis:
        return list(arguments[part : part + 1])
    return [arguments[0]] if origin in (list, tuple) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
