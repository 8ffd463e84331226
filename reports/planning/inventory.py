"""The report of an inventory: what each model gets, on which GPUs, in which format, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence

from reports.blocks import Block, Column, Document, Report, Row, Shown, Table, Text
from reports.layout import bullets
from reports.planning.report import costs_blocks, goal_cell, percent


def inventory_report(document: Document) -> Report:
    """The answer, models and their GPUs, the formats that the split does not use, and the cost."""
    spare = [f"{count} {gpu}" for gpu, count in document["spare"].items() if count]
    blocks: list[Block] = [
        Text(f"{document['name']}: {document['note'].lower()}", "note"),
        Text(document["answer"], "answer"),
        Text(""),
        _models(document["models"]),
        Text("Engines", "heading"),
        _engines(document["rows"], list(document["question"]["goals"])),
        Text("Rates of several rows of a model add: a router sends each its share. Other formats are alternatives; "
             "what they cost in quality is not simulated.", "note"),
    ]  # fmt: skip
    if spare:
        blocks.append(Text(f"Spare: {', '.join(spare)}."))
    blocks += costs_blocks(document["costs"])
    if document["refused"]:
        lines = [f"{entry['model']} in {entry['weights']} on {entry['gpu']}: {entry['why']}"
                 for entry in document["refused"]]  # fmt: skip
        blocks += [Text("Cannot run", "heading"), bullets(lines)]
    return Report("What an inventory serves", blocks)


def _models(models: Sequence[Document]) -> Table:
    columns = [Column("model", left=True), Column("requests/s"), Column("wanted"), Column("")]
    rows: list[Row] = [
        [entry["model"], Shown(f"{entry['rate']:.4g}", entry["rate"]),
         "–" if entry["wanted"] is None else f"{entry['wanted']:g}", "✓" if entry["met"] else "✗"]
        for entry in models
    ]  # fmt: skip
    return Table(columns, rows)


def _engines(rows: Sequence[Document], goals: Sequence[str]) -> Table:
    columns = [Column("model", left=True), Column("weights"), Column("on"), Column("", help="Used, or an alternative"),
               Column("GPUs"), Column("engines"), Column("settings", 2), Column("requests/s"), *map(Column, goals),
               Column("binds", 2), Column("sure")]  # fmt: skip
    cells: list[Row] = []
    for row in rows:
        head = [row["model"], row["weights"], row["gpu"], row["role"]]
        rate = Shown(f"{row['rate']:.4g}", row["rate"])
        if "goals" not in row:
            cells.append([*head, "–", "–", "–", rate, *["–"] * len(goals), "–", "–"])
            continue
        settings = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
        cells.append([*head, row["devices"], row["parallelism"], settings, rate, *map(goal_cell, row["goals"]),
                      row["binds"] or "a queue", percent(row["sure"])])  # fmt: skip
    return Table(columns, cells, fits=True)
