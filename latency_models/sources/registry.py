"""The sources that scenarios may name, found in this folder, and the `step_time` section that names one.

A source is a module here, or `spec.py` in a folder, and needs no entry anywhere. It is imported when a scenario names
it. A source that lives elsewhere is registered when its module is imported.
"""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_args

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from latency_models import sources
from latency_models.io.config_io import Strict, checked
from latency_models.step_time import StepTime
from workloads.errors import BadInput


class SourceSpec(Strict):
    """Base class of `step_time` sections: a subclass has `source: Literal["its name"]`, and is registered."""

    @abstractmethod
    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`. Raises `BadInput` if it cannot be built."""

    def provenance(self) -> dict[str, Any]:
        """The source's name and its fields `path`, `model` and `hardware`, for the documents of a run."""
        names = (name for name in ("path", "model", "hardware") if getattr(self, name, None) is not None)
        return {"source": self.name(), **{name: getattr(self, name) for name in names}}

    def check_ranks(self, data_parallel: int) -> None:
        """Refuse another number of data-parallel ranks than the settings' (`BadInput`); by default none."""

    def check_stages(self, pipeline_parallel: int) -> None:
        """Refuse another number of pipeline stages than the settings' (`BadInput`); by default none."""

    @classmethod
    def name(cls) -> str:
        """The value of `source` that stands for this class."""
        (name,) = get_args(cls.model_fields["source"].annotation)
        return str(name)


SOURCES: dict[str, type[SourceSpec]] = {}
"""Registered sources by name."""


def register(spec: type[SourceSpec]) -> type[SourceSpec]:
    """Class decorator: let scenarios use a source by its name; `ValueError` if another class has it."""
    name = spec.name()
    if SOURCES.setdefault(name, spec) is not spec:
        raise ValueError(f"expected a name that is not taken, found {name}")
    return spec


def built_in_sources() -> dict[str, type[SourceSpec]]:
    """All sources of this folder, imported, and those that are registered elsewhere, by name."""
    for module in iter_modules(sources.__path__, f"{sources.__name__}."):
        import_module(f"{module.name}.spec" if module.ispkg else module.name)
    return dict(sorted(SOURCES.items()))


def find_source(name: str) -> type[SourceSpec]:
    """The source of this name. Of those in this folder, only this one is imported."""
    if name not in SOURCES:
        for module in iter_modules(sources.__path__, f"{sources.__name__}."):
            if module.name.endswith(f".{name}"):
                import_module(f"{module.name}.spec" if module.ispkg else module.name)
        if name not in SOURCES and name not in built_in_sources():
            expected = ", ".join(map(repr, built_in_sources()))
            raise BadInput(f"expected one of {expected}", field="source", value=name)
    return SOURCES[name]


def _check(section: Any, check_fields: ValidatorFunctionWrapHandler) -> SourceSpec:
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


KERNEL_TABLES = "kernel_tables"
AICONFIGURATOR = "aiconfigurator"

_FILES = {
    AICONFIGURATOR: "*_perf.[tp]*",
    KERNEL_TABLES: "attention.csv*",
    "vllm_step_log": "*steps.csv*",
    "engine_regression": "engine-steps*.yaml",
}


def source_of(folder: Path) -> str | None:
    """The source whose files are in a folder; None where there are none."""
    return next((source for source, pattern in _FILES.items() if any(folder.glob(pattern))), None)


def other_source(folder: Path, expected: str) -> str:
    """A hint for a message about a missing file, if a folder is of another source than `expected`."""
    source = source_of(folder)
    if source is None or source == expected:
        return ""
    return f"; the folder looks like one of source {source}"
