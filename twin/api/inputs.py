"""Inputs of programs and commands: a scenario file in memory with changed fields, and checks of other arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scenarios.reading import Settings, of_kind, parse_overrides, read_scenario, single_settings
from twin import process
from twin.executors.executor import Executor, Processes
from workloads.errors import BadInput

if TYPE_CHECKING:
    from scenarios.afd import AfdScenario
    from scenarios.serving import ServingScenario

Overrides = Mapping[str, Any] | Iterable[str] | str
"""Changed fields of a scenario: dotted keys with their values, or texts `key=value` as after `--set`."""

Variations = Mapping[str, Iterable[Any]] | Iterable[str] | str
"""Several values of fields: dotted keys with their values, or texts `key=v1,v2` as after `--set`."""


def require_at_least(name: str, value: int | None, minimum: int) -> None:
    """Refuse (`BadInput` about `name`) a value that is no whole number or below `minimum`; None passes."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if value is not None and (not whole or value < minimum):
        raise BadInput(f"expected a whole number from {minimum} up", field=name, value=value)


def check_counts(replications: int, draws: int | None) -> None:
    """Refuse (`BadInput` about the flag) a number of replications or draws that is too small."""
    if replications is None:
        raise BadInput("expected a whole number from 1 up", field="--replications")
    require_at_least("--replications", replications, 1)
    require_at_least("--draws", draws, 0)


def require_above_0(name: str, value: float | None) -> None:
    """Refuse (`BadInput` about `name`) a value that is not above 0; None passes."""
    if value is not None and not value > 0:
        raise BadInput("expected a number above 0", field=name, value=value)


def require_port(value: int) -> None:
    """Refuse (`BadInput`) a `--port` that no address has."""
    if not 0 <= value <= 65535:
        raise BadInput("expected a port from 0 to 65535", field="--port", value=value)


def path_of(name: str, value: object, expected: str = "expected a path") -> Path:
    """The path that an argument names, or `BadInput` about `name`."""
    if not isinstance(value, str | Path):
        raise BadInput(expected, field=name, value=value)
    return Path(value)


def refuse_for_kind(
    arguments: Mapping[str, bool], kind: str, document: Mapping[str, Any], file: Path, instead: Mapping[str, str]
) -> None:
    """Refuse (`BadInput`) arguments that are given and that only scenarios of `kind` have.

    `instead`: the end of the message by kind: the way in which such a scenario is swept.
    """
    actual = document["kind"]
    for name, is_given in arguments.items():
        if is_given and actual != kind:
            expected = f"expected a scenario of kind {kind}; this one is of kind {actual}{instead[actual]}"
            raise BadInput(expected, field=name, file=file)


def settings_of(overrides: Overrides | None) -> Settings:
    """One value for each changed field; `BadInput` for what is neither a mapping nor texts `key=value`."""
    if overrides is None:
        return {}
    if isinstance(overrides, Mapping):
        return {_key("overrides", key): _plain(value) for key, value in overrides.items()}
    return single_settings(_texts("overrides", overrides), "; twin.sweep(…, vary=…) tries several")


def values_of(vary: Variations | None) -> dict[str, list[Any]]:
    """The values of each varied field; `BadInput` for texts that are not `key=v1,v2`, and for no list of values."""
    if vary is None:
        return {}
    if not isinstance(vary, Mapping):
        return parse_overrides(_texts("vary", vary))
    variations: dict[str, list[Any]] = {}
    for name, values in vary.items():
        key = _key("vary", name)
        plain = None if isinstance(values, str | Mapping) or not isinstance(values, Iterable) else _plain(list(values))
        if not plain:
            raise BadInput("expected a list of values", field=f"vary {key}", value=values)
        variations[key] = plain
    return variations


@contextlib.contextmanager
def errors_name_arguments() -> Iterator[None]:
    """Name Python arguments in place of command-line flags in every `BadInput` of the block: `ratio` for `--ratio`."""
    try:
        yield
    except BadInput as error:
        if not (error.field or "").startswith("--"):
            raise
        flag, *rest = str(error.field).removeprefix("--").split(" ")
        field = " ".join(["overrides" if flag == "set" else flag.replace("-", "_"), *rest])
        raise BadInput(error.expected, value=error.value, field=field, file=error.file, line=error.line) from None


def _texts(name: str, overrides: Iterable[str] | str) -> Sequence[str]:
    texts = [overrides] if isinstance(overrides, str) or not isinstance(overrides, Iterable) else list(overrides)
    if not all(isinstance(text, str) for text in texts):
        expected = "expected a mapping of dotted keys to values, or texts such as 'seed=2'"
        raise BadInput(expected, field=name, value=overrides)
    return texts


def _key(name: str, key: object) -> str:
    if not isinstance(key, str):
        raise BadInput("expected dotted keys as text", field=name, value=key)
    return key


def _plain(value: Any) -> Any:
    """The value as a YAML file would give it: paths as text, NumPy scalars and arrays as numbers and lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


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


KINDS = "local, dask, dask://host:port or ray"


@dataclass(frozen=True)
class ExecutorChoice:
    """A checked choice of an executor, which starts nothing; `address`: of a Dask scheduler, "" for own workers."""

    kind: str
    address: str
    jobs: int

    def start(self) -> AbstractContextManager[Executor]:
        """The executor, to be opened with `with`; `BadInput` if it cannot be started, or connected to."""
        if self.kind == "local":
            return contextlib.nullcontext(Processes(self.jobs))
        from twin.executors.clusters import dask_executor, ray_executor

        return dask_executor(self.address, self.jobs) if self.kind == "dask" else ray_executor(self.jobs)


def choose_executor(text: str = "local", jobs: int | None = None) -> ExecutorChoice:
    """The executor that `--executor` and `--jobs` ask for; `BadInput` for an unknown one, or jobs of a cluster."""
    require_at_least("--jobs", jobs, 1)
    if not isinstance(text, str):
        raise BadInput(f"expected {KINDS}", field="--executor", value=text)
    kind, _, address = text.partition("://")
    host, _, port = address.rpartition(":")
    if kind not in ("local", "dask", "ray") or ("://" in text and (kind != "dask" or not host or not port.isdecimal())):
        raise BadInput(f"expected {KINDS}", field="--executor", value=text)
    if address and jobs is not None:
        raise BadInput(f"expected none beside --executor {text}, which has workers of its own", field="--jobs")
    return ExecutorChoice(kind, address, jobs or process.usable_cores())
