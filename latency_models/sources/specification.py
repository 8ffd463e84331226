"""The scenario section of a step-time source: fields that build a model."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, get_args

from latency_models.io.config_io import Strict
from latency_models.step_time import StepTime


class SourceSpec(Strict):
    """Base class of the `step_time` sections of a scenario.

    A subclass has a field `source: Literal["its name"]`, fields for its settings, and is registered with `register`.
    """

    @abstractmethod
    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`.

        Raises:
            BadInput: settings or files that no model can be built from.
        """

    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """The source's name, and the origin of its figures, for the documents of a run."""

    def check_ranks(self, data_parallel: int) -> None:
        """Compare settings with the engine's data-parallel ranks. The default accepts any number.

        Raises:
            BadInput: settings for another number of ranks.
        """

    def check_stages(self, pipeline_parallel: int) -> None:
        """Compare settings with the engine's pipeline stages. The default accepts any number.

        Raises:
            BadInput: settings for another number of stages.
        """

    @classmethod
    def name(cls) -> str:
        """The value of `source` that stands for this class."""
        (name,) = get_args(cls.model_fields["source"].annotation)
        return str(name)


SOURCES: dict[str, type[SourceSpec]] = {}
"""Registered sources by name."""


def register(spec: type[SourceSpec]) -> type[SourceSpec]:
    """Class decorator: let scenarios use a source by its name.

    Raises:
        ValueError: another class has the same name.
    """
    name = spec.name()
    if SOURCES.setdefault(name, spec) is not spec:
        raise ValueError(f"expected a name that is not taken, found {name}")
    return spec
