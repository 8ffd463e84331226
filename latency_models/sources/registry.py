"""The sources that scenarios may name, found in this folder, and the `step_time` section that names one.

A source is `spec.py` in a folder of its name, or a module here, and needs no entry anywhere. It is imported when a
scenario names it. A source that lives elsewhere is registered when its module is imported.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from latency_models import sources
from latency_models.io.config_io import checked
from latency_models.sources.specification import SOURCES, SourceSpec
from workloads.errors import BadInput


def built_in_sources() -> dict[str, type[SourceSpec]]:
    """All sources of this folder, imported, and those that are registered elsewhere, by name."""
    for module in iter_modules(sources.__path__, f"{sources.__name__}."):
        import_module(f"{module.name}.spec" if module.ispkg else module.name)
    return dict(sorted(SOURCES.items()))


def find_source(name: str) -> type[SourceSpec]:
    """The source of this name. Of those in folders, only this one is imported."""
    if name not in SOURCES:
        packages = (module.name for module in iter_modules(sources.__path__) if module.ispkg)
        if name in packages:
            import_module(f"{sources.__name__}.{name}.spec")
        if name not in SOURCES and name not in built_in_sources():
            expected = ", ".join(map(repr, built_in_sources()))
            raise BadInput(f"expected one of {expected}", field="source", value=name)
    return SOURCES[name]


def _check(section: Any, check_fields: ValidatorFunctionWrapHandler) -> SourceSpec:
    """The section as an instance of the source that it names."""
    if isinstance(section, SourceSpec):
        return section
    if not isinstance(section, dict):
        raise BadInput("expected a mapping", value=section)
    if "source" not in section:
        raise BadInput("required field is missing", field="source")
    return checked(find_source(str(section["source"])), section, None)


if TYPE_CHECKING:
    StepTimeSpec: TypeAlias = SourceSpec
else:
    StepTimeSpec = Annotated[SourceSpec, WrapValidator(_check), SerializeAsAny()]
    """The `step_time` section of a scenario."""
