"""Paths in documents that leave the folder of their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latency_models.io.builtin_files import is_path


def absolute(value: Any, base: Path, key: str = "") -> Any:
    """A document whose paths start from the root: those of files, and of models that are files."""
    if isinstance(value, dict):
        return {name: absolute(each, base, name) for name, each in value.items()}
    if isinstance(value, list):
        return [absolute(each, base, key) for each in value]
    files = key in ("path", "tables") or (key in ("model", "hardware") and isinstance(value, str) and is_path(value))
    if isinstance(value, str) and (files or (key == "plugins" and value.endswith(".py"))):
        return str(base / value)
    return value
