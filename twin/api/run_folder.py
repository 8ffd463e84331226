"""Run folders of commands and programs: manifest, figures and page, which a finished run's document alone makes."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.run_directory import RunDirectory, begin_run, commit, write_text
from twin import __version__
from twin.api.inputs import path_of
from workloads.errors import BadInput

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.figure import Figure

    from reports.blocks import Report
    from reports.run_directory import RunDirectory

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
        illustrate(run.path, *draw(document, run.manifest))
    run.set_status(True, "complete")
    return document


def manifest(inputs: dict[str, Any], call: str | None = None) -> dict[str, Any]:
    """`manifest.json` with a command's `inputs`; `call`: the Python call that made the run, None: the command line."""
    system = platform.uname()  # `platform.platform` starts a process to ask for the processor, too
    machine = (system.system, system.release, system.machine, *filter(None, platform.libc_ver()))
    return {
        "command": call or shlex.join(["twin", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": "-".join(machine),
        "packages": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
        **inputs,
    }


REPORTS = {
    "twin.simulation/1": "serving_run:run_report",
    "twin.serving-sweep/1": "serving_sweep:sweep_report",
    "twin.ablation/1": "serving_sweep:ablation_report",
    "twin.sweep/1": "afd_report:sweep_report",
    "twin.plan/1": "plan_report:plan_report",
    "twin.max-load/1": "plan_report:load_report",
    "twin.day-plan/1": "day_plan:day_report",
    "twin.inventory/1": "plan_report:inventory_report",
    "twin.validation/2": "validation:validation_report",
    "twin.bundle-validation/1": "validation:bundle_report",
}
"""Functions of `reports` that make a result's report, by the schema of its document."""

PAPER = re.compile(r"twin\.reproduction-(?P<paper>[a-z]+)(?P<quality>-quality)?/1")
"""Schemas of reproduced papers; `papers.<paper>` shows their documents."""


def report(document: Document) -> Report:
    """The report of a document; `BadInput` if no command of this version writes it, `KeyError` without a field."""
    schema = document.get("schema")
    if schema == "twin.reproduction/1":
        return report(document["sweep"])
    if isinstance(schema, str) and schema in REPORTS:
        module, _, name = REPORTS[schema].partition(":")
        result: Report = getattr(import_module(f"reports.{module}"), name)(document)
        return result
    paper = _paper_report(schema)
    if paper is None:
        expected = "expected the schema of a run: a sweep, a simulation, a plan or a reproduction of this version"
        raise BadInput(expected, field="schema", value=schema)
    from reports.blocks import Picture, Report

    pictures = [Picture(name, svg) for name, svg in paper.figures(document).items()]
    title = f"The {document['paper']} paper: printed, and computed again"
    return Report(title, [*pictures, *paper.tables(document)])


def draw(document: Document, manifest: Document) -> tuple[dict[str, str], str]:
    """Figures by name, each an SVG text, and the HTML page; errors are those of `report`."""
    from reports.html import page
    from reports.svg import figures

    content = report(document)
    return figures(content), page(content, manifest)


def figure(document: Document, kind: str) -> Figure:
    """One figure of a simulation or a sweep; else a `BadInput` that lists the kinds that there are."""
    from reports.blocks import Figure as Charts
    from reports.svg import drawing

    figures = {block.name: block for block in report(document) if isinstance(block, Charts) and block.name}
    if isinstance(kind, str) and kind in figures:
        return drawing(figures[kind])
    needed = "a run with detail: true" if document["schema"] == "twin.simulation/1" else "several configurations"
    expected = f"expected one of {', '.join(figures)}" if figures else f"expected {needed}"
    raise BadInput(expected, field="kind", value=kind)


def illustrate(folder: Path, figures: dict[str, str], page: str) -> Path:
    """Write figures and page into a run's folder; returns the page's path."""
    for name, svg in figures.items():
        write_text(folder / "figures" / f"{name}.svg", svg)
    return write_text(folder / "report.html", page)


def _paper_report(schema: object) -> ModuleType | None:
    """The module in `papers` that shows documents of a schema, if this version has one."""
    named = PAPER.fullmatch(schema) if isinstance(schema, str) else None
    if named is None:
        return None
    try:
        return import_module(f"papers.{named['paper']}.{'quality' if named['quality'] else 'reproduction'}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("papers."):
            raise
        return None
