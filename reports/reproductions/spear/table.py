"""Tables of the reproduced SPEAR paper: published beside computed, and the disagreements."""

from __future__ import annotations

from reports.blocks import Report, Table
from reports.layout import Document, Section, bullets, disagreements, milliseconds, percent, sections, table


def tables(document: Document) -> Report:
    """Table 3, the SLO scheduler against static sizes, the alternatives, then the disagreements in words."""
    workload, coarse = document["workload"], document["coarse"]
    parts: list[Section] = [
        (
            f"Table 3, ms: Llama-2-7B, {workload['rate']:g} requests/s, {workload['sampling']}"
            " (* fitted, the others held out; brackets: 95 % of single runs)",
            _rows(document["rows"]),
        ),
        (
            "Mean TTFT of the SLO scheduler less that of every static size that meets its goal, ms"
            " (brackets: 95 % of the mean)",
            _against(document),
        ),
        ("Iteration latency that the static rows imply, ms", _iteration(document["iteration"])),
        (f"The same predictions with chunks in multiples of {coarse['step']}, ms", _rows(coarse["rows"])),
        ("Other readings of static chunking and other samplings: errors", _alternatives(document)),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _rows(rows: list[Document]) -> Table:
    """Both columns of Table 3: printed, predicted, error, the range of single runs, and whether it holds the print."""
    column = ("predicted", "error", "interval", "inside")
    shown = table("scheduler", "density", "P99 ITL", *column, "TTFT", *column)
    for row in rows:
        name = row["scheduler"] + ("*" if row["fitted"] else "")
        shown.add_row(name, row["density"], *_cells(row["p99_itl"]), *_cells(row["ttft"]))
    return shown


def _cells(found: Document) -> list[str]:
    return [
        milliseconds(found["published"]),
        milliseconds(found["predicted"]),
        percent(found["error"]),
        _range(found["prediction"]),
        "yes" if found["inside"] else "no",
    ]


def _against(document: Document) -> Table:
    """One line for each static size whose P99 ITL keeps the goal, as printed or as predicted."""
    shown = table("goal", "density", "static", "printed", "predicted", "interval")
    for each in document["against_static"]:
        for size in each["sizes"]:
            shown.add_row(
                f"{1e3 * each['goal']:g}",
                each["density"],
                str(size["static"]),
                _difference(size["published"]),
                _difference(size["predicted"]),
                "" if size["predicted"] is None else _range(size["confidence"], "+"),
            )
    return shown


def _difference(seconds: float | None) -> str:
    return "misses it" if seconds is None else f"{1e3 * seconds:+.1f}"


def _iteration(found: Document) -> Table:
    columns = [name for name in found if name != "tokens"]
    shown = table("tokens", *("without" if name == "w4" else name for name in columns))
    for index, tokens in enumerate(found["tokens"]):
        shown.add_row(str(tokens), *(f"{1e3 * found[name][index]:.2f}" for name in columns))
    return shown


def _alternatives(document: Document) -> Table:
    """The chosen alternative comes first. Errors of static rows are root mean squares of logarithms, of its fit."""
    shown = table("reading", "sampling", "static P99 ITL", "static TTFT", "SLO P99 ITL", "SLO TTFT")
    held = [row for row in document["rows"] if not row["fitted"]]
    for each in ({**document["fit"], "rows": held}, *document["alternatives"]):
        spans = (_percent_span([row[name]["error"] for row in each["rows"]]) for name in ("p99_itl", "ttft"))
        misfits = (f"{100 * each[name]:.1f} %" for name in ("misfit_p99_itl", "misfit_ttft"))
        shown.add_row(each["reading"], each["sampling"], *misfits, *spans)
    return shown


def _percent_span(errors: list[float]) -> str:
    return f"{percent(min(errors))} to {percent(max(errors))}"


def _range(bounds: list[float], sign: str = "") -> str:
    low, high = (f"{1e3 * each:{sign}.1f}" for each in bounds)
    return f"[{low}, {high}]"
