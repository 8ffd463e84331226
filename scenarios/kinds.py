"""Kinds of scenario files, and the commands that run them. Fields are checked elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latency_models.io.config_io import read_yaml
from workloads.errors import BadInput

COMMANDS = {
    "afd-bundle": "twin sweep",
    "serving": "twin simulate or twin sweep",
    "validation": "twin validate",
}
"""The commands that take each kind of scenario."""


def read_scenario(path: Path, kind: str, *others: str) -> dict[str, Any]:
    """Read a scenario file of one of these kinds; nothing else in it is checked.

    Args:
        kind, others: what the calling command takes, keys of `COMMANDS`.

    Raises:
        BadInput: the file cannot be read, is not a YAML mapping, is of no known kind, or is of a kind that another
            command takes; the message then names that command.
    """
    return of_kind(read_yaml(path), path, kind, *others)


def of_kind(document: dict[str, Any], path: Path, *kinds: str) -> dict[str, Any]:
    """The document, if its `kind` is one of `kinds`.

    Raises:
        BadInput: it is of no known kind, or of a kind that another command takes; the message then names that command.
    """
    kind = document.get("kind")
    if kind in kinds:
        return document
    expected = f"expected {' or '.join(kinds)}"
    if isinstance(kind, str) and kind in COMMANDS:
        expected += f"; a scenario of kind {kind} is for {COMMANDS[kind]}"
    raise BadInput(expected, field="kind", value=kind, file=path)
