"""Paths in documents that leave the folder of their file."""

from __future__ import annotations

from os.path import relpath
from pathlib import Path
from typing import Any

from latency_models.io.builtin_files import is_path

FILES = frozenset({"path", "tables", "acceptance_profile", "efficiency"})
"""Fields that hold a file."""

NAMES_OR_FILES = frozenset({"model", "hardware", "calibration", "cost", "link"})
"""Fields that hold a built-in name or a file."""


def moved(value: Any, base: Path, folder: Path | None = None, key: str = "") -> Any:
    """A document for another folder.

    Args:
        base: the folder that relative paths in it start from. folder: the one that they will start from; None: they
            become absolute.
    """
    if isinstance(value, dict):
        return {name: moved(each, base, folder, name) for name, each in value.items()}
    if isinstance(value, list):
        return [moved(each, base, folder, key) for each in value]
    if not isinstance(value, str):
        return value
    if key in FILES or (key in NAMES_OR_FILES and is_path(value)) or (key == "plugins" and value.endswith(".py")):
        path = (base / value).absolute()
        if folder is None:
            return str(path)
        text = relpath(path, folder.absolute())
        return text if "/" in text or is_path(text) else f"./{text}"
    return value
