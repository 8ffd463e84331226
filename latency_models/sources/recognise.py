"""Recognises the source of a folder of tables by the names of its files."""

from __future__ import annotations

from pathlib import Path

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
    found = source_of(folder)
    if found is None or found == expected:
        return ""
    return f"; the folder looks like one of source {found}"
