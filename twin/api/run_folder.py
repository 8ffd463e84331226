"""Run folders at a path that a program gives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reports.records.run_directory import RunDirectory, begin_run
from workloads.errors import BadInput


@contextlib.contextmanager
def save_run(folder: Path, manifest: dict[str, Any]) -> Iterator[RunDirectory]:
    """A new run folder at exactly this path. It is complete when the block ends; otherwise it says why not.

    Raises:
        BadInput: the folder is not empty. OSError: it cannot be written.
    """
    try:
        run = begin_run(folder, manifest)
    except FileExistsError:
        raise BadInput("expected an empty folder, or none", field="folder", value=str(folder)) from None
    with run:
        yield run
        run.set_status(True, "complete")
