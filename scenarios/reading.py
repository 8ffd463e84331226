"""Makes a checked scenario from a document and `--set`, which may use earlier names of fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from latency_models.io.config_io import Strict, checked
from latency_models.io.earlier_names import Notes, present_key, present_names, print_notes
from scenarios.overrides import Settings, apply
from scenarios.plugins import load_plugins
from workloads.errors import BadInput

_Scenario = TypeVar("_Scenario", bound=Strict)


def check(
    model: type[_Scenario], document: dict[str, Any], settings: Settings, path: Path, notes: Notes | None = None
) -> _Scenario:
    """Apply `settings` to a document, and check it.

    Its plug-ins are imported first. Fields with earlier names are read, and listed in one note on stderr.

    Args:
        notes: of earlier names that have been replaced already.

    Raises:
        BadInput: naming the file, the field, the value and what was expected.
    """
    notes = {} if notes is None else notes
    present = present_settings(model, settings, notes)
    try:
        document = present_names(model, apply(present_names(model, document, notes), present), notes)
    except BadInput as error:
        if error.field == "--set":
            raise
        raise error.in_file(path) from None
    load_plugins(document, path)
    scenario = checked(model, document, path)
    print_notes(notes)
    return scenario


def present_settings(model: type[Strict], settings: Settings, notes: Notes | None = None) -> Settings:
    """Rename the fields of `settings` to their present names.

    Raises:
        BadInput: a field is set under two names.
    """
    notes = {} if notes is None else notes
    present: Settings = {}
    for key, value in settings.items():
        name = present_key(model, key, notes)
        if name in present:
            raise BadInput(f"expected {name} alone: {key} is another name of it", field="--set", value=key)
        present[name] = value
    return present
