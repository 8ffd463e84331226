"""The report of an ablation: which features pay, alone and with the others on."""

from __future__ import annotations

from typing import Any

from reports.blocks import Block, Chart, Column, Curve, Document, Figure, Report, Shown, Table, Text

TITLES = {
    "output_throughput": "output tok/s", "goodput": "goodput", "ttft.mean": "TTFT mean", "ttft.p99": "TTFT P99",
    "tpot.mean": "TPOT mean", "tpot.p99": "TPOT P99", "e2e.mean": "E2E mean",
}  # fmt: skip


def ablation_report(document: Document) -> Report:
    """The blocks of a document `twin.ablation/1`."""
    objective = document["objective"]
    others = [name for name in TITLES if name != objective and any(name in row["changes"] for row in document["rows"])]
    columns = [
        Column("feature", left=True), Column("value", left=True), Column("context", 1, left=True), Column("verdict"),
        Column(TITLES[objective], help="Change with the feature, and its 95 % interval."),
        *(Column(TITLES[name], 3) for name in others),
    ]  # fmt: skip
    table = Table(columns, title=f"{document['name']}: does it pay?", fits=True, sorts=True)
    for row in document["rows"]:
        changes = [_percent(row["changes"].get(name)) for name in others]
        table.add_row(
            row["feature"], row["value"], row["context"], row["verdict"],
            _percent(row["changes"].get(objective), ends=True), *changes,
        )  # fmt: skip
    blocks: list[Block] = [table]
    blocks += [Text(f"{row['feature']}, {row['value']}: {row['reason']}", "note") for row in _refused(document)]
    if document["skipped"]:
        skipped = "; ".join(f"{name} ({reason})" for name, reason in document["skipped"].items())
        blocks.append(Text(f"Left out: {skipped}.", "note"))
    blocks.append(Text(document["note"], "note"))
    if charts := [_chart(document, context) for context in ("alone", "others on") if _decided(document, context)]:
        blocks.append(Figure("ablation", charts, size=(7.6, 3.0 * len(charts)), on_page=False))
    return Report(f"{document['name']}: which features pay", blocks)


def _refused(document: Document) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row.get("reason") and row["context"] == "alone"]


def _decided(document: Document, context: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["context"] == context and document["objective"] in row["changes"]]


def _chart(document: Document, context: str) -> Chart:
    rows = _decided(document, context)
    changes = [row["changes"][document["objective"]] for row in rows]
    names = [f"{row['feature']}\n{row['value']}" for row in rows]
    percent = {end: [100 * change[end] for change in changes] for end in ("change", "low", "high")}
    curve = Curve("", names, percent["change"], kind="points", low=percent["low"], high=percent["high"])
    return Chart(context, [curve], "", f"{TITLES[document['objective']]}, %", from_zero=False)


def _percent(change: dict[str, float] | None, *, ends: bool = False) -> str | Shown:
    if change is None:
        return "–"
    text = f"{100 * change['change']:+.1f} %"
    if ends:
        text += f" ({100 * change['low']:+.1f} to {100 * change['high']:+.1f})"
    return Shown(text, 100 * change["change"], "%")
