"""The answer to a planning question, for a terminal: a sentence, a table, and what would change it."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from reports.fitting_table import Column, FittingTable
from reports.layout import bullets, table

Document = dict[str, Any]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
INTERVALS = (
    "±: half a 95 % interval of the mean over windows. Sure: share of the draws of the step times' error under which "
    "all goals hold (–: the error is unknown). Hours: share of hours like this one that meet them, if step times are "
    "as estimated."
)


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
    estimated = [str(i) for i, each in enumerate(document.get("rows", ()), 1) if each["role"] == "best estimate"]
    row = f" Row {estimated[0]}: cheapest by the best estimate of the step times." if estimated else ""
    return (
        f"{INTERVALS}{row} {_capital(document['question']['arrivals'])}. Windows of {window['requests']:,} requests; "
        f"{window['warmup']:g} s at their begin do not count; all candidates get the same requests."
    )


def _columns(document: Document, rows: list[Document]) -> list[Column]:
    keys = list(rows[0]["settings"])
    columns = [
        Column("", [str(i + 1) for i in range(len(rows))]),
        Column("GPUs", [each["devices"] for each in rows]),
        Column("engines", [each["parallelism"] for each in rows]),
        *(Column(_folded(key.rpartition(".")[2]), [str(each["settings"][key]) for each in rows], 1) for key in keys),
    ]
    if any(each["cost_per_hour"] is not None for each in rows):
        columns.append(Column("$/h", [_number(each["cost_per_hour"]) for each in rows], 2))
        columns.append(Column("$/M tokens", [_number(each["cost_per_million_output_tokens"]) for each in rows], 4))
    columns.append(Column("tok/s/GPU", [_number(each["tokens_per_second_per_gpu"]) for each in rows], 3))
    columns.append(Column("tok/s/user", [_number(each["tokens_per_second_per_user"]) for each in rows], 3))
    for i, goal in enumerate(document["question"]["goals"]):
        columns.append(Column(goal, [goal_cell(each["goals"][i]) for each in rows]))
    columns.append(Column("sure", [percent(each["sure"]) for each in rows]))
    columns.append(Column("hours", [percent(each["probability"]) for each in rows]))
    return columns


def percent(share: float | None) -> str:
    """A share as it is shown, rounded down to whole percent."""
    return "–" if share is None else f"{math.floor(100 * share + 1e-9)} %"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _folded(name: str, longest: int = 10) -> str:
    """A long name on several lines, broken behind underscores."""
    lines = [""]
    for part in re.findall(r"[^_]*_|[^_]+", name):
        if lines[-1] and len(lines[-1] + part) > longest:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def goal_cell(goal: Document) -> str:
    """A goal's value in a unit that reads well, half its interval, and whether it is met."""
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
    return Text(f"\nMax load: {headroom['rate']:.4g} requests/s{more}. A little above: {headroom['beyond']}.")


def _changes(changes: list[Document]) -> RenderableType:
    shown = table("change", "", "sure", "hours", "")
    shown.columns[-1].justify = "left"
    for each in changes:
        shown.add_row(
            each["change"],
            "✓" if each["meets"] else "✗",
            percent(each["sure"]),
            percent(each["probability"]),
            each["reason"],
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
    """Counts of candidates by their status, with the most frequent reason of each kind, and what was not tried."""
    entries = document["ledger"]
    evaluated = document["evaluated"]
    lines = [f"{len(entries):,} candidates: {evaluated:,} evaluated by simulation, {len(entries) - evaluated:,} pruned"]
    for status, count in Counter(each["status"] for each in entries).most_common():
        reasons = Counter(each["reason"] for each in entries if each["status"] == status and each["reason"])
        common = reasons.most_common(1)
        lines.append(f"{count} {status}" + (f"; for example: {common[0][0]}" if common else ""))
    return [*lines, *document.get("notes", ())]  # none in runs of earlier versions
