"""Run folders at a path that a program gives, and the last files of every run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reports.records.run_directory import RunDirectory, begin_run
from twin.api.arguments import path_of
from twin.api.drawing import illustrate
from twin.api.manifest import manifest
from workloads.errors import BadInput

Document = dict[str, Any]


def new_run(folder: str | Path, scenario: Path, inputs: Document, call: str) -> RunDirectory:
    """A new run folder at exactly this path, to be opened with `with`.

    Args:
        inputs: entries of the manifest. call: the Python call that makes the run.

    Raises:
        BadInput: the folder is not empty. OSError: it cannot be written.
    """
    path = path_of("folder", folder)
    try:
        return begin_run(path, manifest({"scenario_file": str(scenario), **inputs}, call))
    except FileExistsError:
        raise BadInput("expected an empty folder, or none", field="folder", value=str(path)) from None


def complete(run: RunDirectory, document: Document, *, figures: bool) -> Document:
    """Write the summary, figures and page into a run's folder, which is complete then; returns the summary."""
    document = {**document, "run": {"id": run.id, "directory": str(run.path)}}
    run.write_json("summary.json", document)
    if figures:
        illustrate(document, run)
    run.set_status(True, "complete")
    return document
