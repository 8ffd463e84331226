"""The answer to a planning question, for a terminal: a sentence, a table, and what would change it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from reports.fitting_table import Column, FittingTable
from reports.layout import bullets, table

Document = dict[str, Any]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
INTERVALS = "±: half a 95 % interval of the mean over windows. Chance: that an hour like this one meets all goals."


def plan_table(document: Document) -> RenderableType:
    """The answer, the best deployments, the changes, and how the candidates ended."""
    title = Text(f"{document['name']}: {document['note'].lower()}", style="dim")
    parts: list[RenderableType] = [title, Text(document["answer"], style="bold")]
    if not document["feasible"]:
        parts += _nearest(document)
    rows = document["rows"]
    if rows:
        parts += [Text(""), FittingTable(_columns(document, rows)), Text(footnote(document), style="dim")]
    if document["headroom"]:
        parts.append(_headroom(document["headroom"]))
    if document["changes"]:
        parts += [Text("\nWhat would change it", style="bold"), _changes(document["changes"])]
    parts += [Text("\nCandidates", style="bold"), bullets(ledger_lines(document))]
    return Group(*parts)


def load_table(document: Document) -> RenderableType:
    """The rate that a deployment bears, in a sentence, and how its goals stand at that rate."""
    title = Text(f"{document['name']}: {document['note'].lower()}", style="dim")
    parts: list[RenderableType] = [title, Text(document["answer"], style="bold")]
    if document["feasible"]:
        columns = _columns(document, [document["deployment"]])
        parts += [Text(""), FittingTable(columns), Text(footnote(document), style="dim")]
        parts += [Text(f"A little above: {document['beyond']}.")]
    return Group(*parts)


def footnote(document: Document) -> str:
    """A line on the origin of the figures."""
    window = document["question"]["window"]
    return (
        f"{INTERVALS} Windows of {window['requests']:,} requests, of which {window['warmup']:g} s at the begin do not "
        "count; all candidates get the same requests."
    )


def _columns(document: Document, rows: list[Document]) -> list[Column]:
    keys = list(rows[0]["settings"])
    columns = [
        Column("", [str(i + 1) for i in range(len(rows))]),
        Column("GPUs", [each["devices"] for each in rows]),
        Column("engines", [each["parallelism"] for each in rows]),
        *(Column(key.rpartition(".")[2], [str(each["settings"][key]) for each in rows], 2) for key in keys),
    ]
    if any(each["cost_per_hour"] is not None for each in rows):
        columns.append(Column("$/h", [_number(each["cost_per_hour"]) for each in rows], 1))
        columns.append(Column("$/M tokens", [_number(each["cost_per_million_output_tokens"]) for each in rows], 3))
    columns.append(Column("tok/s/GPU", [_number(each["tokens_per_second_per_gpu"]) for each in rows], 1))
    columns.append(Column("tok/s/user", [_number(each["tokens_per_second_per_user"]) for each in rows], 1))
    for i, goal in enumerate(document["question"]["goals"]):
        columns.append(Column(goal, [_goal(each["goals"][i]) for each in rows]))
    columns.append(Column("chance", [f"{100 * each['probability']:.0f} %" for each in rows]))
    return columns


def _goal(goal: Document) -> str:
    if goal["value"] is None:
        return "– ✗"
    mark = "✓" if goal["met"] else "✗"
    low, high = goal["interval"] or (goal["value"], goal["value"])
    half = (high - low) / 2
    if goal["name"].rpartition(".")[2].partition("_")[0] in LATENCIES:
        scale, unit = (1e3, "ms") if goal["value"] < 1 else (1.0, "s")
        text = f"{scale * goal['value']:.3g}" + (f" ±{scale * half:.2g}" if half else "") + f" {unit}"
    else:
        text = f"{goal['value']:.4g}" + (f" ±{half:.2g}" if half else "")
    return f"{text} {mark}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _headroom(headroom: Document) -> Text:
    more = "" if headroom["factor"] is None else f" ({100 * (headroom['factor'] - 1):+.0f} %)"
    return Text(f"\nIt bears {headroom['rate']:.4g} requests/s{more}. A little above: {headroom['beyond']}.")


def _changes(changes: list[Document]) -> RenderableType:
    shown = table("change", "", "chance", "")
    shown.columns[-1].justify = "left"
    for each in changes:
        shown.add_row(
            each["change"], "✓" if each["meets"] else "✗", f"{100 * each['probability']:.0f} %", each["reason"]
        )
    return shown


def _nearest(document: Document) -> list[RenderableType]:
    miss = document["nearest_miss"]
    if miss is None:
        reasons = dict.fromkeys(each["reason"] for each in document["ledger"])
        return [bullets(list(reasons)[:5])]
    settings = "".join(f", {key} {value}" for key, value in miss["settings"].items())
    return [Text(f"Nearest miss: {miss['devices']} ({miss['parallelism']}{settings}). {miss['reason']}.")]


def ledger_lines(document: Document) -> list[str]:
    """Counts of candidates by their status, with the most frequent reason of each kind."""
    entries = document["ledger"]
    lines = []
    for status, count in Counter(each["status"] for each in entries).most_common():
        reasons = Counter(each["reason"] for each in entries if each["status"] == status and each["reason"])
        common = reasons.most_common(1)
        lines.append(f"{count} {status}" + (f"; for example: {common[0][0]}" if common else ""))
    return lines
