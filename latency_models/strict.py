"""Files that people write: YAML read strictly, and every fault told in one line with its file, field and value."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from workloads.errors import BadInput


class Strict(BaseModel):
    """A section of a file: no unknown fields, no silent conversions, no infinities, no change after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain YAML values only; a key given twice is an error; 1e-3 is a number, as everyone but YAML 1.1 thinks."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    __import__("re").compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml_text(text: str) -> Any:
    """The value that a piece of YAML stands for.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        BadInput: it cannot be read, is not YAML, or is something other than a mapping with text keys.
    """
    text = read_text(path)
    try:
        document = read_yaml_text(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise BadInput(f"expected YAML: {problem}", file=path, line=mark and mark.line + 1) from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise BadInput("expected a mapping of fields", value=document, file=path)
    return document


def read_text(path: Path) -> str:
    """A text file's content.

    Raises:
        BadInput: there is no such file, it is a folder, may not be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"expected a readable file: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise BadInput("expected a text file in UTF-8", file=path) from None


def explain_validation(error: ValidationError, file: Path | None, model: type[BaseModel] | None = None) -> BadInput:
    """The first fault that pydantic found, as one line; how many more there are; and the nearest field to a misspelt
    one.

    Args:
        model: what was being checked, for suggestions.
    """
    faults = error.errors(include_url=False)
    first = faults[0]
    field = ".".join(str(part) for part in first["loc"] if not _is_variant(part)) or None
    expected, value = _expectation(first), first["input"]
    if first["type"] == "extra_forbidden":
        expected = "unknown field" + _suggestion(str(first["loc"][-1]), model)
    if first["type"] == "missing":
        value = None
    if len(faults) > 1:
        expected += f" (and {len(faults) - 1} more)"
    return BadInput(expected, value=value, field=field, file=file)


def _is_variant(part: object) -> bool:
    """Pydantic names the member of a union it tried; that is no field of the user's."""
    return isinstance(part, str) and (part.endswith("Spec") or part in UNION_TAGS)


UNION_TAGS = frozenset(
    {"fixed", "geometric", "lognormal", "uniform", "closed_loop", "poisson", "gamma", "deterministic", "replay", "str"}
)


def _expectation(fault: Any) -> str:
    message: str = fault["msg"].removeprefix("Value error, ")
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return "expected this field, found nothing"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    if kind == "union_tag_invalid":
        return f"expected {context['discriminator']} one of {context['expected_tags']}"
    if kind == "union_tag_not_found":
        return f"expected a section with the field {context['discriminator']}"
    return message.replace("Input should be", "expected").replace("String should", "expected text that should")


def _suggestion(name: str, model: type[BaseModel] | None) -> str:
    if model is None:
        return ""
    known = _field_names(model, set())
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else ""


def _field_names(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[str]:
    """Every field name in a model and the models inside it."""
    seen.add(model)
    names: set[str] = set()
    for name, field in model.model_fields.items():
        names.add(field.alias or name)
        for inner in _models_in(field.annotation):
            if inner not in seen:
                names |= _field_names(inner, seen)
    return names


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
