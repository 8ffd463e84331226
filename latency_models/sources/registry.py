"""The sources that scenarios may name, found in this folder, and the `step_time` section made of them.

Every module of `latency_models.sources`, and `spec.py` of every folder, is imported, so that a file or folder that is
added here needs no entry anywhere. A source that lives elsewhere is registered when its module is imported.
"""

from __future__ import annotations

import functools
import operator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from latency_models import sources
from latency_models.io.config_io import checked
from latency_models.sources.specification import SOURCES, SourceSpec


def _load() -> dict[str, type[SourceSpec]]:
    """The built-in sources by name, in alphabetical order."""
    for module in iter_modules(sources.__path__, f"{sources.__name__}."):
        import_module(f"{module.name}.spec" if module.ispkg else module.name)
    return dict(sorted(SOURCES.items()))


def _check(section: Any, check_union: ValidatorFunctionWrapHandler) -> SourceSpec:
    """Read sources that were registered after the union of sources was made."""
    if isinstance(section, SourceSpec):
        return section
    name = section.get("source") if isinstance(section, dict) else None
    if isinstance(name, str) and name in SOURCES and name not in _BUILT_IN:
        return checked(SOURCES[name], section, None)
    spec: SourceSpec = check_union(section)
    return spec


_BUILT_IN = _load()

if TYPE_CHECKING:
    StepTimeSpec: TypeAlias = SourceSpec
else:
    StepTimeSpec = Annotated[
        functools.reduce(operator.or_, _BUILT_IN.values()),
        Field(discriminator="source"),
        WrapValidator(_check),
        SerializeAsAny(),  # a source registered later is none of the union's types
    ]
    """The `step_time` section of a scenario: a union of all sources, told apart by their names."""
