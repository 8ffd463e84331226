"""Figures and HTML page of a finished run, from its document alone."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from workloads.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from reports.records.run_directory import RunDirectory

Document = dict[str, Any]

REPRODUCTION = "twin.reproduction-"
"""Documents of reproduced serving papers: `twin.reproduction-<paper>/1`, shown by `reports.reproductions.<paper>`."""


def draw(document: Document, manifest: Document) -> tuple[dict[str, str], str]:
    """Figures by name, each an SVG text, and the HTML page.

    Raises:
        BadInput: a document that no command of this version writes. KeyError: one that lacks a field.
    """
    schema = document.get("schema")
    match schema:
        case "twin.sweep/1" | "twin.reproduction/1":
            from reports.afd import figures, page

            sweep = document.get("sweep", document)
            drawn = figures.sweep_figures(sweep)
            return drawn, page.sweep_page(sweep, manifest)
        case "twin.simulation/1":
            from reports.serving import figures as serving_figures
            from reports.serving import page as serving_page

            drawn = serving_figures.simulation_figures(document)
            return drawn, serving_page.simulation_page(document, manifest)
        case "twin.serving-sweep/1":
            from reports.serving import figures as serving_figures
            from reports.serving import page as serving_page

            drawn = serving_figures.sweep_figures(document)
            return drawn, serving_page.sweep_page(document, manifest)
        case "twin.plan/1":
            from reports.planning.figures import plan_figures
            from reports.planning.page import plan_page

            return plan_figures(document), plan_page(document, manifest)
        case "twin.validation/2":
            from reports.reproductions.page import terminal_page
            from reports.validation.figures import validation_figures
            from reports.validation.page import validation_charts
            from reports.validation.table import validation_table

            drawn = validation_figures(document)
            title = f"{document['name']}: predicted and measured"
            return drawn, terminal_page(title, validation_table(document), manifest, validation_charts(document))
        case "twin.bundle-validation/1":
            from reports.reproductions.page import terminal_page
            from reports.validation.bundle_figures import bundle_figures
            from reports.validation.bundle_table import bundle_table
            from reports.validation.page import bundle_charts

            drawn = bundle_figures(document)
            title = f"{document['name']}: predicted and measured"
            return drawn, terminal_page(title, bundle_table(document), manifest, bundle_charts(document))
        case "twin.reproduction-sun-quality/1":
            from reports.reproductions.page import reproduction_page
            from reports.reproductions.sun import quality_figures, quality_table

            drawn = quality_figures.figures(document)
            return drawn, reproduction_page("sun", quality_table.tables(document), manifest, drawn)
        case "twin.reproduction-spear-quality/1":
            from reports.reproductions.page import reproduction_page
            from reports.reproductions.spear import quality_figures as spear_figures
            from reports.reproductions.spear import quality_table as spear_table

            drawn = spear_figures.figures(document)
            return drawn, reproduction_page("spear", spear_table.tables(document), manifest, drawn)
    paper = _paper(schema)
    if paper is None:
        expected = "expected the schema of a run: a sweep, a simulation, a plan or a reproduction of this version"
        raise BadInput(expected, field="schema", value=schema)
    from reports.reproductions.page import reproduction_page

    drawn = import_module(f"reports.reproductions.{paper}.figures").figures(document)
    tables = import_module(f"reports.reproductions.{paper}.table").tables(document)
    return drawn, reproduction_page(paper, tables, manifest, drawn)


def drawings(document: Document) -> dict[str, Callable[[Document], Figure]]:
    """The functions that draw the figures of a simulation or a sweep, by the names that the figures have in `draw`."""
    match document["schema"]:
        case "twin.simulation/1":
            from reports.serving.figures import simulation_drawings

            return simulation_drawings(document)
        case "twin.serving-sweep/1":
            from reports.serving.figures import sweep_drawings

            return sweep_drawings(document)
    from reports.afd import figures

    return figures.sweep_drawings(document)


def figure(document: Document, kind: str) -> Figure:
    """One figure of a simulation or a sweep.

    Raises:
        BadInput: there is no figure of that kind of this document; the message lists those that there are.
    """
    known = drawings(document)
    if isinstance(kind, str) and kind in known:
        return known[kind](document)
    expected = f"expected one of {', '.join(known)}" if known else f"expected {_needed(document)}"
    raise BadInput(expected, field="kind", value=kind)


def _needed(document: Document) -> str:
    """The reason why a document has no figures."""
    return "a run with detail: true" if document["schema"] == "twin.simulation/1" else "several configurations"


def illustrate(document: Document, run: RunDirectory) -> None:
    """Write figures and page into the run's folder."""
    figures, page = draw(document, run.manifest)
    for name, svg in figures.items():
        run.write_text(f"figures/{name}.svg", svg)
    run.write_text("report.html", page)


def _paper(schema: object) -> str | None:
    """The reproduced paper that a schema names, if this version can show it."""
    if not isinstance(schema, str) or not (schema.startswith(REPRODUCTION) and schema.endswith("/1")):
        return None
    paper = schema[len(REPRODUCTION) : -len("/1")]
    package = f"reports.reproductions.{paper}"
    spec = find_spec(package) if paper.isalpha() else None
    known = spec is not None and spec.submodule_search_locations is not None  # a folder, as each paper has
    return paper if known and find_spec(f"{package}.figures") is not None else None
