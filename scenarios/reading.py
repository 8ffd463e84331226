"""Scenario files as commands read them, with overrides of their fields.

`--set a.b=8` changes any field, `--set a.b=1,2,4` tries several values of it, and `--set a.b=5:40:5` those from 5 to 40
in steps of 5. With `--zip a=1,2 b=3,4`, the first values of fields go together, the second ones, and so on.

A plug-in registers policies, routers, trace formats or step-time sources by name when it is imported, and the scenario
names them. Reading a scenario therefore runs the code of its plug-ins.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import re
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, Field

from latency_models.io.config_io import MAX_DEPTH, Strict, checked, read_text, read_yaml, read_yaml_text
from latency_models.io.files import CommandLineText, from_command_line
from scenarios.fields import LATENCY, SWEEP_POINTS, Name, has_no_unit, read_goal
from workloads.errors import BadInput, TwinError

Settings = dict[str, Any]

_NUMBER = r"\s*-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?\s*"
_RANGE = re.compile(f"({_NUMBER}):({_NUMBER}):({_NUMBER})")

OWN_RANGES = frozenset({"ratio"})
"""Fields whose values may read like ranges, with a meaning of their own: they are left as they are."""


def parse_overrides(texts: Iterable[str], flag: str = "--set") -> dict[str, list[Any]]:
    """Parse each `key=v1,v2` into a dotted key and its values, read as YAML (so 1 is a number and [1, 2] a list).

    A value `start:stop:step` stands for the numbers from start to stop, which is one of them if a step ends there.
    `BadInput` for other texts, a key given twice or too deep, and values that exceed a limit of `config_io`.
    """
    overrides: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")) or not values.strip():
            raise BadInput("expected key=value or key=v1,v2", field=flag, value=text)
        if key.count(".") > MAX_DEPTH:
            raise BadInput(f"expected a key of at most {MAX_DEPTH} sections", field=flag, value=text)
        if key in overrides:
            raise BadInput("expected each key once; give several values as key=v1,v2", field=flag, value=text)
        parts = _split(values)
        overrides[key] = [value for part in parts for value in _values(part, text, flag, key)]
    return overrides


def parse_zipped(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse fields that vary together, each `key=v1,v2` or several of these with blanks between them."""
    words = [word for text in texts for word in re.split(r"\s+(?=[\w.-]+=)", text.strip())]
    overrides = parse_overrides(words, "--zip")
    counts = {key: len(values) for key, values in overrides.items()}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise BadInput(f"expected as many values of each field, found: {numbers}", field="--zip", value=words)
    return overrides


def single_settings(texts: Iterable[str], hint: str = "") -> Settings:
    """Parse overrides for a command that takes one value a key; `hint` names a command that takes several."""
    overrides = parse_overrides(texts)
    for key, values in overrides.items():
        if len(values) > 1:
            raise BadInput(f"expected one value a key{hint}", field=f"--set {key}", value=values)
    return {key: value for key, (value,) in overrides.items()}


def goals_of_texts(texts: Iterable[str], flag: str = "--slo") -> dict[str, float | str]:
    """The mapping of goals given as `name=limit`. Limits of latencies have a unit."""
    goals: dict[str, float | str] = {}
    for text in texts:
        try:
            ((name, values),) = parse_overrides([text]).items()
        except BadInput as error:
            raise BadInput("expected GOAL=LIMIT, for example ttft_p99=1s", field=flag, value=error.value) from None
        if len(values) != 1 or name in goals:
            raise BadInput("expected one limit for each goal", field=flag, value=text)
        goals[name] = limit = values[0]
        if LATENCY.fullmatch(name) and has_no_unit(limit):
            expected = f"expected a limit with its unit: {name}={limit}ms or {name}={limit}s"
            raise BadInput(expected, field=flag, value=text)
        try:
            read_goal(name, limit)
        except BadInput as error:
            raise BadInput(error.expected, field=flag, value=text) from None
    return goals


def combinations(overrides: dict[str, list[Any]], zipped: dict[str, list[Any]] | None = None) -> Iterator[Settings]:
    """Every combination of one value a key, in order; `zipped` keys vary together. One empty one without overrides."""
    together = zipped or {}
    tied = list(zip(*together.values(), strict=True)) if together else [()]
    for key in together:
        if key in overrides:
            raise BadInput("expected each key once, in --set or in --zip", field="--zip", value=key)
    count = math.prod(map(len, overrides.values())) * len(tied)
    if count > SWEEP_POINTS.maximum:
        raise BadInput(SWEEP_POINTS.expectation(count), field="--set", value=count)
    for values in itertools.product(*overrides.values(), tied):
        yield dict(zip(overrides, values[:-1], strict=True)) | dict(zip(together, values[-1], strict=True))


def apply(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """A copy of `document` with each dotted key set; sections on the way are made when absent.

    A key names an item of a list by its number or, if it has one, by its `name`: `system.pools.decode.replicas`. Paths
    among the values will start from the current folder, where those in `document` start from the file's.
    """
    result = dict(document)
    for key, value in settings.items():
        *path, last = key.split(".")
        section: Any = result
        for depth, name in enumerate(path):
            place = _place(section, name, key)
            inner = section.get(place) if isinstance(section, dict) else section[place]
            if inner is not None and not isinstance(inner, dict | list):
                dotted = ".".join(path[: depth + 1])
                raise BadInput(f"expected a section at {dotted!r}, found {inner!r}", field="--set", value=key)
            section[place] = section = {} if inner is None else inner.copy()
        section[_place(section, last, key)] = from_command_line(value)
    return result


def _place(section: dict[str, Any] | list[Any], name: str, key: str) -> Any:
    if isinstance(section, dict):
        return name
    names = [item.get("name") if isinstance(item, dict) else None for item in section]
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(section):
        return int(name)
    items = ", ".join(str(item_name) for item_name in names if item_name) or f"a number below {len(section)}"
    raise BadInput(f"expected an item of the list ({items}), found {name!r}", field="--set", value=key)


def in_words(settings: Settings) -> str:
    """Settings in words: `batch_size=128, seed=2`."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _split(values: str) -> list[str]:
    parts, depth, quote, current = [], 0, "", ""
    for character in values:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def _values(text: str, override: str, flag: str, key: str) -> list[Any]:
    match = _RANGE.fullmatch(text)
    if match is None or key in OWN_RANGES:
        return [_value(text, override, flag)]
    start, stop, step = (Decimal(number.strip()) for number in match.groups())
    if step == 0 or (stop - start) / step < 0:
        raise BadInput("expected start:stop:step with a step from start to stop", field=flag, value=override)
    count = int((stop - start) // step) + 1
    if count > SWEEP_POINTS.maximum:
        raise BadInput(SWEEP_POINTS.expectation(count), field=flag, value=override)
    numbers = [start + i * step for i in range(count)]
    whole_numbers = all(number == number.to_integral_value() for number in (start, step)) and "." not in text
    return [int(number) if whole_numbers else float(number) for number in numbers]


def _value(text: str, override: str, flag: str) -> Any:
    if not text.strip():
        raise BadInput("expected a value between commas", field=flag, value=override)
    try:
        return read_yaml_text(text)
    except yaml.YAMLError as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise BadInput(f"expected a YAML value: {problem}", field=flag, value=override) from None


def with_trace(
    document: dict[str, Any], trace: Path | None, lengths: Collection[str] = ("prefill", "decode", "tasks")
) -> dict[str, Any]:
    """A scenario with a trace in place of the fields `lengths` of its workload; the same without a trace."""
    if trace is None:
        return document
    workload = {key: value for key, value in (document.get("workload") or {}).items() if key not in lengths}
    workload["trace"] = {**(workload.get("trace") or {}), "path": str(trace.absolute())}
    return {**document, "workload": workload}


COMMANDS = {"afd-bundle": "twin sweep", "serving": "twin simulate or twin sweep", "validation": "twin validate"}
"""The commands that take each kind of scenario."""


def read_scenario(path: Path, kind: str, *more_kinds: str) -> dict[str, Any]:
    """Read a scenario file of one of these kinds (keys of `COMMANDS`); nothing else in it is checked."""
    return of_kind(read_yaml(path), path, kind, *more_kinds)


def of_kind(document: dict[str, Any], path: Path, *kinds: str) -> dict[str, Any]:
    """The document, if its `kind` is one of `kinds`."""
    kind = document.get("kind")
    if kind in kinds:
        return document
    expected = f"expected {' or '.join(kinds)}"
    if isinstance(kind, str) and kind in COMMANDS:
        expected += f"; a scenario of kind {kind} is for {COMMANDS[kind]}"
    raise BadInput(expected, field="kind", value=kind, file=path)


ENDING = ".py"


@dataclass(frozen=True)
class ImportedPlugin:
    """A plug-in as another process can import it, with source and path if it is a file; else None and ""."""

    module: str
    source: str | None = None
    file: str = ""


class PluginChanged(TwinError):
    """A plug-in has been imported with another source; registered names cannot be taken back."""


_imported: dict[str, ImportedPlugin] = {}
"""Plug-ins by module, as the registries that they fill: of the whole process."""


def _from_current_folder(value: Any) -> Any:
    from_command_line = isinstance(value, CommandLineText) and value.endswith(ENDING)
    return str(Path(value).absolute()) if from_command_line else value


Plugin = Annotated[str, BeforeValidator(_from_current_folder)]
"""The path of a Python file (it ends in .py), or the name of a module that can be imported."""


class _Plugins(Strict):
    plugins: list[Plugin] = Field(default_factory=list)


def load_plugins(document: dict[str, Any], path: Path) -> None:
    """Import the plug-ins that a scenario names, each once a process. Files start from the scenario's folder."""
    if "plugins" not in document:
        return
    for i, name in enumerate(checked(_Plugins, {"plugins": document["plugins"]}, path).plugins):
        try:
            _import(name, path.parent)
        except BadInput as error:
            raise BadInput(error.expected, field=f"plugins[{i}]", value=name, file=path) from None
        except Exception as error:  # whatever the code of a plug-in raises
            expected = f"expected a plug-in that can be imported: {type(error).__name__}: {error}"
            raise BadInput(expected, field=f"plugins[{i}]", value=name, file=path) from None


def plugin_digest(names: Sequence[str], base: Path) -> str:
    """A digest of the names of plug-ins, and of the content of those that are files."""
    content = [read_text(base / name) if name.endswith(ENDING) else name for name in names]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()


def _import(name: str, base: Path) -> None:
    if not name.endswith(ENDING):
        importlib.import_module(name)
        _imported.setdefault(name, ImportedPlugin(name))
        return
    file = (base / name).resolve()
    source = read_text(file)
    module_name = f"twin_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:10]}"
    if module_name in sys.modules:
        return
    _execute(ImportedPlugin(module_name, source, str(file)))


def _execute(plugin: ImportedPlugin) -> None:
    assert plugin.source is not None
    module = types.ModuleType(plugin.module)
    module.__file__ = plugin.file
    sys.modules[plugin.module] = module
    try:
        exec(compile(plugin.source, plugin.file, "exec"), vars(module))
    except BaseException:
        del sys.modules[plugin.module]
        raise
    _imported[plugin.module] = plugin


def imported_plugins() -> tuple[ImportedPlugin, ...]:
    """The plug-ins that this process has imported, for a worker process to import them too."""
    return tuple(plugin for name, plugin in _imported.items() if name in sys.modules)


def import_again(plugins: Sequence[ImportedPlugin]) -> None:
    """Import the plug-ins of another process, those that are files from their source: the file may not be here.

    Raises `PluginChanged` where this process has another source of one, and `ImportError`.
    """
    for plugin in plugins:
        if plugin.source is None:
            importlib.import_module(plugin.module)
        elif plugin.module not in sys.modules:
            _execute(plugin)
        elif _imported[plugin.module].source != plugin.source:
            raise PluginChanged(f"another version of the plug-in {plugin.file}; which stays until it is started again")


class ScenarioFile(Strict):
    """Base class of all kinds of scenario; `plugins` are imported when it is read."""

    schema_: Literal["twin.scenario/1"] = Field(alias="schema")
    kind: str
    name: Name
    description: str = ""
    plugins: list[Plugin] = Field(default_factory=list)
    seed: int = Field(default=0, ge=0)


_Scenario = TypeVar("_Scenario", bound=Strict)


def check(model: type[_Scenario], document: dict[str, Any], settings: Settings, path: Path) -> _Scenario:
    """Import the plug-ins of a document, apply `settings` to it, and check it."""
    try:
        document = apply(document, settings)
    except BadInput as error:
        if error.field == "--set":
            raise
        raise error.in_file(path) from None
    load_plugins(document, path)
    return checked(model, document, path)
