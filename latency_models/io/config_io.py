"""Configuration files: strict models, YAML within limits, and sections that are imported when a file has them.

YAML here means plain values (no objects) and mappings without repeated keys. Numbers follow YAML 1.2: 1e-3 is a number,
while 1:32 and 007 are text (YAML 1.1 reads 92 and 7). Two rules of YAML 1.1 remain: 1_000 is a thousand, and unquoted
yes, no, on and off are booleans.

Before a value is built, the events of a piece of YAML are compared with bounds on nesting and size: the C loader
recurses once a level of nesting and overflows the stack of the process some 20,000 levels down, and a few lines of
aliases can stand for gigabytes. The parser of events does neither.

A scenario may have sections for planning, sessions, autoscaling and more, each of which takes milliseconds to import
and to make a validator for. Most files have none of them. A model refers to such a section by its place:

    if TYPE_CHECKING:
        from scenarios.planning import PlanSpec
    else:
        PlanSpec = late_section("scenarios.planning", "PlanSpec")
"""

from __future__ import annotations

import functools
import io
import re
import sys
from collections.abc import Hashable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import core_schema

from latency_models.io.validation_errors import explain_validation
from workloads.errors import BadInput, readable

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from yaml import SafeLoader as _FastestLoader
else:
    _FastestLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


MAX_BYTES = 32 * 2**20
"""Bytes of a text file: far more than a scenario, a calibration or a kernel table takes."""

MAX_DEPTH = 100
"""Levels of nested mappings and lists."""

MAX_VALUES = 1_000_000
"""Keys, values, mappings and lists, with each alias counted as all that it stands for. Reading them takes 400 MB."""

MAX_BITS = 1023
"""Bits of a whole number: as many as a float can hold. Python does not even print one of 4,300 decimal digits."""


def check_limits(text: str, loader: type[Any]) -> None:
    """Compare the nesting and the number of values of `text` with the limits above, event by event."""
    values, open_nodes = 0, list[tuple[str | None, int]]()
    sizes: dict[str | None, int | None] = {}
    for event in yaml.parse(text, loader):
        match event:
            case yaml.AliasEvent():
                size = sizes.get(event.anchor, 1)
                if size is None:
                    raise _fault(f"the alias {event.anchor} stands inside what it names", event)
                values += size
            case yaml.CollectionStartEvent():
                open_nodes.append((event.anchor, values))
                sizes |= {event.anchor: None} if event.anchor else {}
                values += 1
            case yaml.CollectionEndEvent():
                anchor, before = open_nodes.pop()
                sizes |= {anchor: values - before} if anchor else {}
            case yaml.ScalarEvent():
                sizes |= {event.anchor: 1} if event.anchor else {}
                values += 1
        if len(open_nodes) > MAX_DEPTH:
            raise _fault(f"nested more than {MAX_DEPTH} deep", event)
        if values > MAX_VALUES:
            raise _fault(f"more than {MAX_VALUES:,} values, aliases counted as what they stand for", event)


def _fault(problem: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


__all__ = [
    "Strict",
    "checked",
    "explain_validation",
    "print_note",
    "read_text",
    "read_yaml",
    "read_yaml_text",
    "write_yaml",
]

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """Base class of file sections. Unknown fields, conversions and infinities are errors; instances are frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


_MERGE, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))


class _Loader(_FastestLoader):
    """Loads plain YAML values. Repeated keys and unrepresentable values are errors with a line number."""

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
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = _MERGE if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the other kind is refused by the loader itself
                if key in keys:
                    name = "<<" if key == _MERGE else key
                    raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", key_node.start_mark)
                keys.add(key)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if not isinstance(value, int) or value.bit_length() <= MAX_BITS:
                return value
            problem = f"a whole number of more than {MAX_BITS} bits"
        except ValueError as error:  # 2026-02-31, or an integer of 5,000 digits
            problem = str(error)
        except (LookupError, AttributeError):  # !!bool maybe
            problem = f"{node.value!r} does not fit its tag"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` or YAML 1.1 would read as something else."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Quote text with unusual line breaks, which survive in double quotes only."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _use_plain_numbers() -> None:
    """Recognise the numbers of YAML 1.2 in place of those of YAML 1.1."""
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in _Loader.yaml_implicit_resolvers.items()
    }
    integer = r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$"
    exponent = "[eE][-+]?[0-9]+"
    finite = rf"[0-9][0-9_]*(?:\.[0-9_]*(?:{exponent})?|{exponent})|\.[0-9][0-9_]*(?:{exponent})?"
    real = rf"^(?:[-+]?(?:{finite}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$"
    for user in (_Loader, _Dumper):
        user.add_implicit_resolver(_FLOAT, re.compile(real), list("-+.0123456789"))
        user.add_implicit_resolver(_INT, re.compile(integer), list("-+0123456789"))


_use_plain_numbers()
_Dumper.add_representer(str, _write_text)


def read_yaml_text(text: str) -> Any:
    """The value of a piece of YAML; `yaml.YAMLError` for a key that comes twice, or beyond a limit."""
    try:
        check_limits(text, _FastestLoader)
        return yaml.load(text, _Loader)
    except UnicodeEncodeError:  # half a surrogate pair, from a command line that is not UTF-8
        raise yaml.YAMLError("text that is not UTF-8") from None


def write_yaml(document: dict[str, Any]) -> str:
    """A piece of YAML that `read_yaml_text` reads as the same document, its fields in the order given."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; `BadInput` if it cannot be read, or has other things than text as keys."""
    text = read_text(path)
    try:
        document = read_yaml_text(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise BadInput(f"expected YAML: {problem}", file=path, line=None if mark is None else mark.line + 1) from None
    if not isinstance(document, dict):
        kind = {type(None): ", found nothing", list: ", found a list"}.get(type(document), "")
        raise BadInput(f"expected a mapping of fields{kind}", value=None if kind else document, file=path)
    for key in document:
        if not isinstance(key, str):
            raise BadInput("expected field names that are text", value=key, file=path)
    return document


def read_text(path: Path) -> str:
    """A text file's content, without a byte order mark; `BadInput` if unreadable, above MAX_BYTES, or not UTF-8."""
    with readable(path):
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise BadInput(f"expected a file of at most {MAX_BYTES // 2**20} MiB", file=path)
        text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    return text


def checked(model: type[_Model], document: dict[str, Any], file: Path | None, section: str = "") -> _Model:
    """The document as an instance of `model`; else `BadInput` about its first fault in `file`, below `section`."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise explain_validation(error, file, model, section=section) from None


@functools.cache  # a sweep reads its scenario many times
def print_note(text: str) -> None:
    """Print a line on stderr, the same one once a process."""
    print(f"twin: {text}", file=sys.stderr)


class LateSection:
    """Base class of the types that stand for a section in the annotations of a model."""

    module: ClassVar[str]
    name: ClassVar[str]

    @classmethod
    def annotation(cls) -> Any:
        """The type of the section: a model, or a union, list or dict of some. Imports it."""
        return getattr(import_module(cls.module), cls.name)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._check)

    @classmethod
    def _check(cls, value: Any) -> Any:
        from pydantic import TypeAdapter

        from latency_models.io.validation_errors import explain_validation

        annotation = cls.annotation()
        try:
            return TypeAdapter(annotation).validate_python(value)
        except ValidationError as error:
            raise explain_validation(error, None, annotation) from None


def late_section(module: str, name: str) -> type[LateSection]:
    """A type that stands for the section `name` of `module`, which is imported when a file has it."""
    return type(name, (LateSection,), {"module": module, "name": name})


def late_sections(module: str, *names: str) -> list[type[LateSection]]:
    """Types that stand for several sections of one module."""
    return [late_section(module, name) for name in names]
