"""Reads scenario files: the kind of a file, its plug-ins, and the fields with `--set` applied.

A plug-in registers policies, routers, trace formats or step-time sources by name when it is imported, and the scenario
names them. Reading a scenario therefore runs the code of its plug-ins.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from latency_models.io.builtin_files import CommandLineText
from latency_models.io.config_io import Strict, checked, read_text, read_yaml
from scenarios.fields import Name
from scenarios.overrides import Settings, apply
from workloads.errors import BadInput, TwinError

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
    """The path of a file on the command line, from the current folder."""
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
