"""`plugins`: Python files and modules that a scenario needs, imported before its fields are checked.

A plug-in registers policies, routers, trace formats or step-time sources by name when it is imported, and the scenario
names them. Reading a scenario therefore runs the code of its plug-ins.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from latency_models.io.config_io import Strict, checked, read_text
from latency_models.io.paths import CommandLineText
from workloads.errors import BadInput

ENDING = ".py"


def _from_current_folder(value: Any) -> Any:
    """The path of a file on the command line, from the current folder."""
    from_command_line = isinstance(value, CommandLineText) and value.endswith(ENDING)
    return str(Path(value).absolute()) if from_command_line else value


Plugin = Annotated[str, BeforeValidator(_from_current_folder)]
"""The path of a Python file (it ends in .py), or the name of a module that can be imported."""


class _Plugins(Strict):
    plugins: list[Plugin] = Field(default_factory=list)


def load_plugins(document: dict[str, Any], path: Path) -> None:
    """Import the plug-ins that a scenario names, each once a process. Files start from the scenario's folder.

    Raises:
        BadInput: `plugins` is no list of text, or a plug-in cannot be found or imported.
    """
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
        return
    file = (base / name).resolve()
    read_text(file)  # a file that cannot be read is refused in the usual words
    module_name = f"twin_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:10]}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
