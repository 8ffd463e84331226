"""Checks of a caller's arguments, and their names in errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scenarios.overrides import Settings, parse_overrides, single_settings
from workloads.errors import BadInput

Overrides = Mapping[str, Any] | Iterable[str] | str
"""Changed fields of a scenario: dotted keys with their values, or texts `key=value` as after `--set`."""

Variations = Mapping[str, Iterable[Any]] | Iterable[str] | str
"""Several values of fields: dotted keys with their values, or texts `key=v1,v2` as after `--set`."""


def require_at_least(name: str, value: int | None, least: int) -> None:
    """Refuse a value below `least`; None passes.

    Raises:
        BadInput: with `name` as the field.
    """
    if value is not None and value < least:
        raise BadInput(f"expected a whole number from {least} up", field=name, value=value)


def check_counts(prefix: str, *, jobs: int | None, replications: int, draws: int | None) -> None:
    """Refuse a number of processes, replications or draws that is too small.

    Args:
        prefix: of the names in an error, `--` on the command line.

    Raises:
        BadInput: one of them is.
    """
    for name, value, least in (("jobs", jobs, 1), ("replications", replications, 1), ("draws", draws or 0, 0)):
        require_at_least(prefix + name, value, least)


def refuse_for_kind(
    given: Mapping[str, bool], kind: str, document: Mapping[str, Any], file: Path, instead: Mapping[str, str]
) -> None:
    """Refuse arguments that only scenarios of `kind` have, if `document` is of another kind.

    Args:
        given: whether each argument is given.
        instead: the end of the message by kind: the way in which such a scenario is swept.

    Raises:
        BadInput: one of the arguments is given.
    """
    found = document["kind"]
    for name, is_given in given.items():
        if is_given and found != kind:
            expected = f"expected a scenario of kind {kind}; this one is of kind {found}{instead[found]}"
            raise BadInput(expected, field=name, file=file)


def settings_of(overrides: Overrides | None) -> Settings:
    """One value for each changed field.

    Raises:
        BadInput: a text is not `key=value`, or names several values.
    """
    if overrides is None:
        return {}
    if isinstance(overrides, Mapping):
        return {str(key): _plain(value) for key, value in overrides.items()}
    return single_settings(_texts(overrides), "; twin.sweep(…, vary=…) tries several")


def values_of(vary: Variations | None) -> dict[str, list[Any]]:
    """The values of each varied field.

    Raises:
        BadInput: a text is not `key=v1,v2`, or the values of a field are no list or an empty one.
    """
    if vary is None:
        return {}
    if not isinstance(vary, Mapping):
        return parse_overrides(_texts(vary))
    found: dict[str, list[Any]] = {}
    for key, values in vary.items():
        plain = None if isinstance(values, str | Mapping) or not isinstance(values, Iterable) else _plain(list(values))
        if not plain:
            raise BadInput("expected a list of values", field=f"vary {key}", value=values)
        found[str(key)] = plain
    return found


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


def _texts(overrides: Iterable[str] | str) -> Sequence[str]:
    return [overrides] if isinstance(overrides, str) else list(overrides)


def _plain(value: Any) -> Any:
    """The value as a YAML file would give it: paths as text, NumPy scalars and arrays as numbers and lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
