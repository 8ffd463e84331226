"""Files that people write: YAML read strictly, and every fault told in one line with its file, field and value.

YAML here means plain values (no objects), a key once in each mapping, and numbers as YAML 1.2 has them: 1e-3 is a
number, while 1:32 and 007 are text (YAML 1.1 would make them 92 and 7).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from latency_models.faults import explain_validation
from workloads.errors import BadInput

if TYPE_CHECKING:
    from yaml import SafeLoader as _FastestLoader
else:
    _FastestLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

__all__ = ["Strict", "checked", "explain_validation", "read_text", "read_yaml", "read_yaml_text"]

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A section of a file: no unknown fields, no silent conversions, no infinities, no change after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Loader(_FastestLoader):
    """Plain YAML values; a key given twice is an error; a value that Python cannot hold is told with its line."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the other kind is refused below, by the loader itself
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # 2026-02-31, or an integer of 5,000 digits
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


def _use_plain_numbers(loader: type[_Loader]) -> None:
    """Replace what YAML 1.1 takes for numbers by what YAML 1.2 does."""
    int_tag, float_tag = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in (int_tag, float_tag)]
        for first, known in loader.yaml_implicit_resolvers.items()
    }
    whole = r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$"
    exponent = "[eE][-+]?[0-9]+"
    finite = rf"[0-9][0-9_]*(?:\.[0-9_]*(?:{exponent})?|{exponent})|\.[0-9][0-9_]*(?:{exponent})?"
    real = rf"^(?:[-+]?(?:{finite}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
    loader.add_implicit_resolver(float_tag, re.compile(real), list("-+.0123456789"))
    loader.add_implicit_resolver(int_tag, re.compile(whole), list("-+0123456789"))


_use_plain_numbers(_Loader)


def read_yaml_text(text: str) -> Any:
    """The value that a piece of YAML stands for.

    Raises:
        yaml.YAMLError: it is not YAML, gives a key twice, or is nested too deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None


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
        raise BadInput(f"expected YAML: {problem}", file=path, line=None if mark is None else mark.line + 1) from None
    if document is None:
        raise BadInput("expected a mapping of fields, found nothing", file=path)
    if isinstance(document, list):
        raise BadInput("expected a mapping of fields, found a list", file=path)
    if not isinstance(document, dict):
        raise BadInput("expected a mapping of fields", value=document, file=path)
    for key in document:
        if not isinstance(key, str):
            raise BadInput("expected field names that are text", value=key, file=path)
    return document


def read_text(path: Path) -> str:
    """A text file's content, without a byte order mark.

    Raises:
        BadInput: there is no such file, it is a folder, may not be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"expected a readable file: {error.strerror}", file=path) from None
    except UnicodeDecodeError:
        raise BadInput("expected a text file in UTF-8", file=path) from None
    except ValueError as error:  # a null byte in the path
        raise BadInput(f"expected a path: {error}", value=str(path)) from None


def checked(model: type[_Model], document: dict[str, Any], file: Path | None, section: str = "") -> _Model:
    """`document` as a `model`.

    Args:
        file: where the document came from, for the error.
        section: dotted field under which the document stands in that file.

    Raises:
        BadInput: the first fault (see `explain_validation`).
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise explain_validation(error, file, model, section=section) from None
