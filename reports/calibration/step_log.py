"""Step times that were fitted to a step log, for a terminal."""

from __future__ import annotations

from reports.blocks import Column, Document, Report, Table, Text, texts


def step_log_report(document: Document) -> Report:
    """The error on held-out steps, the batches of the log, and one row for each unknown."""
    median, p90 = (100 * document[f"heldout_{name}_error"] for name in ("median", "p90"))
    table = Table(
        [Column("unknown", left=True), Column("deviation"), Column("by", left=True), Column("to measure", left=True)]
    )
    for row in document["unknowns"]:
        table.add_row(row["about"], f"{100 * row['deviation']:.1f} %", row["basis"], row["measure"])
    answer = Text(f"error on held-out steps {median:.1f} % in the median, {p90:.1f} % at P90", "answer")
    return Report("step times", [answer, *texts(document["seen"], "note"), table])
