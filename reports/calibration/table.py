"""A measured calibration, for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Document = dict[str, Any]

HEADERS = ("operation", "via", "points", "repeats within", "held-out median", "90 %", "allowed", "", "lines")


def operations_table(document: Document) -> RenderableType:
    """One row for each operation, then the overhead of a step, and the operations that were not measured."""
    table = Table(box=None, header_style="bold")
    for header in HEADERS:
        table.add_column(header, justify="left" if header in ("operation", "via", "lines") else "right")
    for name, operation in document["operations"].items():
        held_out = operation.get("held_out")
        table.add_row(
            name,
            operation["via"],
            str(operation["points"]),
            _per_cent(operation["repeat_spread"]),
            _per_cent(held_out["median"]) if held_out else "",
            _per_cent(held_out["p90"]) if held_out else "",
            _per_cent(operation["allowed"]),
            "" if operation["holds"] else "MISSED",
            _lines(operation),
        )
    parts: list[RenderableType] = [Text(headline(document), style="bold"), table, Text(overhead(document))]
    parts += [Text(f"not measured: {name}: {why}", style="dim") for name, why in document.get("skipped", {}).items()]
    return Group(*parts)


def headline(document: Document) -> str:
    """Model, device, and the number of operations whose errors are within their limits."""
    operations = document["operations"].values()
    judged = [each for each in operations if each.get("held_out")]
    hold = sum(each["holds"] for each in judged)
    return (
        f"{document['model']['name']} in {document['dtype']} on {document['provenance']['device']}:"
        f" {hold} of {len(judged)} operations within their allowed held-out error"
    )


def overhead(document: Document) -> str:
    """The overhead of whole steps."""
    told = document["overhead"]
    if told.get("median_error") is None:
        return "whole steps: not measured"
    errors = [each["predicted"] / each["seconds"] - 1 for each in told["steps"]]
    middle = _per_cent(told["median_error"])
    low, high = 100 * min(errors), 100 * max(errors)
    return (
        f"whole steps: {told['factor']:.3f} times their operations + {told['seconds'] * 1e6:.0f} µs; with that"
        f" {len(errors)} steps are predicted {low:+.1f} to {high:+.1f} % off, {middle} in the median"
    )


def _lines(operation: Document) -> str:
    """The line in numbers; the number of lines if there are several."""
    lines = operation["lines"]
    if len(lines) == 1:
        return (
            f"{lines[0]['alpha'] * 1e6:.3g} µs a {operation['axis'].removesuffix('s')} + {lines[0]['beta'] * 1e6:.3g}"
        )
    kept = len({line["where"] for line in lines})
    knees = len(lines) - kept
    return f"{len(lines)}, {knees} knee{'s' * (knees != 1)}" if lines else ""


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"
