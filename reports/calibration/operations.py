"""A measured calibration, for a terminal."""

from __future__ import annotations

from reports.blocks import Block, Column, Document, Report, Table, Text, texts

HEADERS = ("operation", "via", "points", "repeats within", "held-out median", "90 %", "allowed", "", "lines")


def operations_report(document: Document) -> Report:
    """One row for each operation, then the overhead of a step, and the operations that were not measured."""
    columns = [Column(title, left=title in ("operation", "via", "lines")) for title in HEADERS]
    table = Table(columns, edge=True)
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
    blocks: list[Block] = [Text(headline(document), "answer"), table, Text(overhead(document))]
    skipped = (f"not measured: {name}: {why}" for name, why in document.get("skipped", {}).items())
    return Report(document["model"]["name"], [*blocks, *texts(skipped, "note")])


def headline(document: Document) -> str:
    """Model, device, and the number of operations whose errors are within their limits."""
    operations = document["operations"].values()
    judged = [operation for operation in operations if operation.get("held_out")]
    hold = sum(operation["holds"] for operation in judged)
    return (
        f"{document['model']['name']} in {document['dtype']} on {document['provenance']['device']}:"
        f" {hold} of {len(judged)} operations within their allowed held-out error"
    )


def overhead(document: Document) -> str:
    costs = document["overhead"]
    if costs.get("median_error") is None:
        return "whole steps: not measured"
    errors = [step["predicted"] / step["seconds"] - 1 for step in costs["steps"]]
    middle = _per_cent(costs["median_error"])
    low, high = 100 * min(errors), 100 * max(errors)
    return (
        f"whole steps: {costs['factor']:.3f} times their operations + {costs['seconds'] * 1e6:.0f} µs; with that"
        f" {len(errors)} steps are predicted {low:+.1f} to {high:+.1f} % off, {middle} in the median"
    )


def _lines(operation: Document) -> str:
    """The line in numbers; the number of lines if there are several."""
    lines = operation["lines"]
    if len(lines) == 1:
        return (
            f"{lines[0]['alpha'] * 1e6:.3g} µs a {operation['axis'].removesuffix('s')} + {lines[0]['beta'] * 1e6:.3g}"
        )
    knees = len(lines) - len({line["where"] for line in lines})
    return f"{len(lines)}, {knees} knee{'s' * (knees != 1)}" if lines else ""


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"
