"""A scenario file in memory, with the fields that a program has changed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scenarios.overrides import Settings
from scenarios.reading import of_kind, read_scenario
from twin.api.arguments import Overrides, errors_name_arguments, path_of, settings_of

if TYPE_CHECKING:
    from scenarios.afd import AfdScenario
    from scenarios.serving import ServingScenario


@dataclass(frozen=True)
class Scenario:
    """A scenario file, its content, and the fields changed in it, by dotted key.

    Relative paths start from the file's folder, and among `settings` from the current folder.
    """

    path: Path
    document: dict[str, Any]
    settings: Settings

    @property
    def kind(self) -> str:
        """`serving` or `afd-bundle`."""
        return str(self.document["kind"])

    @property
    def name(self) -> str:
        """The scenario's `name` field."""
        return self.spec.name

    @cached_property
    def spec(self) -> ServingScenario | AfdScenario:
        """Every field, checked (`BadInput`), with defaults where the file has none."""
        scenario = import_module("scenarios.serving" if self.kind == "serving" else "scenarios.afd")
        with errors_name_arguments():
            spec: ServingScenario | AfdScenario = scenario.check_scenario(self.document, self.settings, self.path)
            return spec

    def with_overrides(self, overrides: Overrides) -> Scenario:
        """A copy with more fields changed; `BadInput` for a field that cannot be used."""
        changed = opened(self, overrides, self.kind)
        _ = changed.spec
        return changed


def load(path: str | Path, overrides: Overrides | None = None) -> Scenario:
    """Read a scenario file of kind `serving` or `afd-bundle` and check every field.

    `overrides` are a mapping of dotted keys (`{"engine.max_num_seqs": 64}`) or texts (`["engine.max_num_seqs=64"]`).
    `BadInput` names the file, the field, the value and what was expected.
    """
    scenario = opened(path, overrides, "serving", "afd-bundle", argument="path")
    _ = scenario.spec
    return scenario


def opened(
    source: str | Path | Scenario, overrides: Overrides | None, *kinds: str, argument: str = "scenario"
) -> Scenario:
    """A scenario of one of `kinds`, or `BadInput`. Fields are not checked yet, since a trace may replace some."""
    with errors_name_arguments():
        settings = settings_of(overrides)
        if isinstance(source, Scenario):
            document = of_kind(source.document, source.path, *kinds)
            return Scenario(source.path, document, source.settings | settings)
        path = path_of(argument, source, "expected the path of a scenario file, or the result of twin.load")
        return Scenario(path, read_scenario(path, *kinds), settings)
