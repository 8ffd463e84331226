"""Scenario files, before it is known what they describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latency_models.strict import read_yaml
from workloads.errors import BadInput

KINDS = ("afd-bundle", "serving")


def read_scenario(path: Path) -> dict[str, Any]:
    """The scenario file as a document whose `kind` is known, and nothing else checked.

    Raises:
        BadInput: it cannot be read, is not YAML, is not a mapping, or is of no known kind.
    """
    document = read_yaml(path)
    kind = document.get("kind")
    if kind not in KINDS:
        raise BadInput(f"expected one of {', '.join(KINDS)}", field="kind", value=kind, file=path)
    return document
