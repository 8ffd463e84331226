"""Files that people write: YAML read strictly, and every fault told in one line with its file, field and value.

YAML here means plain values (no objects), a key once in each mapping, and numbers as YAML 1.2 has them: 1e-3 is a
number, while 1:32 and 007 are text (YAML 1.1 would make them 92 and 7). Of YAML 1.1 there remain 1_000, a thousand, and
yes, no, on and off, which are true and false; in quotes they are text.
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

__all__ = ["Strict", "checked", "explain_validation", "read_text", "read_yaml", "read_yaml_text", "write_yaml"]

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A section of a file: no unknown fields, no silent conversions, no infinities, no change after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


_MERGE, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))


class _Loader(_FastestLoader):
    """Plain YAML values; a key given twice is an error; a value that Python cannot hold is told with its line."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._seen: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Look for repeated keys before merging, which may make some of its own, and happen more than once."""
        if id(node) not in self._seen:
            self._seen.add(id(node))
            self._refuse_repetition(node)
        super().flatten_mapping(node)

    def _refuse_repetition(self, node: yaml.MappingNode) -> None:
        given: set[Hashable] = set()
        for key_node, _ in node.value:
            key = _MERGE if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the other kind is refused by the loader itself
                if key in given:
                    name = "<<" if key == _MERGE else key
                    raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", key_node.start_mark)
                given.add(key)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # 2026-02-31, or an integer of 5,000 digits
            problem = str(error)
        except (LookupError, AttributeError):  # !!bool maybe
            problem = f"{node.value!r} does not fit its tag"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Puts in quotes whatever text `_Loader`, or YAML 1.1, would take for something else."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Unusual line breaks survive in double quotes only."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _use_plain_numbers() -> None:
    """Read as numbers what YAML 1.2 does, in place of what YAML 1.1 does."""
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in (_INT, _FLOAT)]
        for first, known in _Loader.yaml_implicit_resolvers.items()
    }
    whole = r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$"
    exponent = "[eE][-+]?[0-9]+"
    finite = rf"[0-9][0-9_]*(?:\.[0-9_]*(?:{exponent})?|{exponent})|\.[0-9][0-9_]*(?:{exponent})?"
    real = rf"^(?:[-+]?(?:{finite}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
    for user in (_Loader, _Dumper):
        user.add_implicit_resolver(_FLOAT, re.compile(real), list("-+.0123456789"))
        user.add_implicit_resolver(_INT, re.compile(whole), list("-+0123456789"))


_use_plain_numbers()
_Dumper.add_representer(str, _write_text)


def read_yaml_text(text: str) -> Any:
    """The value that a piece of YAML stands for.

    Raises:
        yaml.YAMLError: it is not YAML, gives a key twice, or is nested too deeply.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except UnicodeEncodeError:  # half a surrogate pair, from a command line that is not UTF-8
        raise yaml.YAMLError("text that is not UTF-8") from None


def write_yaml(document: dict[str, Any]) -> str:
    """A piece of YAML that `read_yaml_text` reads as the same document, its fields in the order given."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


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
