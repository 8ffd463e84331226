"""Run folders at a path that a program gives, and the manifest and the last files of every run folder."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from reports.records.run_directory import RunDirectory, begin_run, commit
from twin import __version__
from twin.api.arguments import path_of
from twin.api.drawing import illustrate
from workloads.errors import BadInput

Document = dict[str, Any]

PACKAGES = ("numpy", "scipy", "simpy", "pydantic", "torch")
"""Packages whose versions may change a result. The manifest names those that are loaded."""


def new_run(folder: str | Path, scenario: Path, inputs: Document, call: str) -> RunDirectory:
    """A new run folder at exactly this path, to be opened with `with`; `BadInput` if not empty, else `OSError`."""
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


def manifest(inputs: dict[str, Any], call: str | None = None) -> dict[str, Any]:
    """`manifest.json` with a command's `inputs`; `call`: the Python call that made the run, None: the command line."""
    return {
        "command": call or shlex.join(["twin", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": _platform(),
        "packages": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
        **inputs,
    }


def _platform() -> str:
    """System, release, machine and C library; `platform.platform` starts a process to ask for the processor, too."""
    system = platform.uname()
    return "-".join((system.system, system.release, system.machine, *filter(None, platform.libc_ver())))
