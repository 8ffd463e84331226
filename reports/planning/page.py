"""The page of a plan that one can explore: the recommendation, deployments, and how every candidate ended."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from reports.html_page import cell, help_table, table
from reports.pages.explorer import View, explorer
from reports.pages.fields import METRICS, Field, metric_fields, setting_fields
from reports.pages.frame import whole_page
from reports.pages.tables import sortable
from reports.planning.table import footnote, goal_cell, ledger_lines, percent
from reports.serving.table import at

if TYPE_CHECKING:
    from reports.pages.frame import Part

Document = dict[str, Any]


def plan_page(document: Document, manifest: Document) -> str:
    """The whole page as one text."""
    parts: list[Part] = [
        f"<h1>{escape(document['name'])}: a plan</h1>",
        f'<p class="answer">{escape(document["answer"])}</p>',
        f'<p class="note">{escape(document["note"])}</p>',
    ]
    if not document["feasible"]:
        parts += _nearest(document)
    rows = document["rows"]
    if rows:
        parts += ["<h2>Deployments</h2>", _goals(rows), f'<p class="note">{escape(footnote(document))}</p>',
                  _explorer(document)]  # fmt: skip
    headroom = document["headroom"]
    if headroom:
        more = "" if headroom["factor"] is None else f" ({100 * (headroom['factor'] - 1):+.0f} %)"
        told = f"Max load: {headroom['rate']:.4g} requests/s{more}. A little above: {headroom['beyond']}."
        parts += ["<h2>Max load</h2>", f"<p>{escape(told)}</p>"]
    if document["changes"]:
        parts += ["<h2>What would change it</h2>", _changes(document["changes"])]
    parts += ["<h2>Candidates</h2>", *(f"<p>{escape(line)}</p>" for line in ledger_lines(document)),
              _ledger(document["ledger"])]  # fmt: skip
    return whole_page(f"{document['name']}: a plan", parts, manifest)


def _nearest(document: Document) -> list[Part]:
    miss = document["nearest_miss"]
    if miss is None:
        return []
    settings = "".join(f", {key} {value}" for key, value in miss["settings"].items())
    text = f"Nearest miss: {miss['devices']} ({miss['parallelism']}{settings}). {miss['reason']}."
    return [f'<p class="warning">{escape(text)}</p>']


def _goals(rows: Sequence[Document]) -> str:
    """Every deployment with its goals: the value, its interval, and whether it is met."""
    headers = {"GPUs": METRICS["devices"].help, "engines": "Kind of engine"}
    headers |= {key.rpartition(".")[2]: f"Setting {key}" for key in rows[0]["settings"]}
    headers |= {goal["name"]: f"Goal {goal['limit']:g}; half a 95 % interval" for goal in rows[0]["goals"]}
    priced = any(row["cost_per_hour"] is not None for row in rows)
    headers |= {"$/h": METRICS["cost_per_hour"].help} if priced else {}
    headers |= {
        "sure": "Share of the draws of the step times' error under which all goals hold",
        "hours": "Share of spans like this one that meet all goals, if step times are as estimated",
    }
    cells = [
        [escape(row["devices"]), escape(row["parallelism"]), *(cell(each) for each in row["settings"].values()),
         *(escape(goal_cell(goal)) for goal in row["goals"]),
         *([cell(row["cost_per_hour"])] if priced else []), percent(row["sure"]), percent(row["probability"])]
        for row in rows
    ]  # fmt: skip
    return help_table(headers, cells)


def _explorer(document: Document) -> Part:
    rows = document["rows"]
    values: dict[str, list[float | str | None]] = {key: [_metric(row, key) for row in rows] for key in METRICS}
    limits = {name.replace("_p", ".p").replace("_mean", ".mean"): limit
              for name, limit in document["question"]["goals"].items()}  # fmt: skip
    metrics = metric_fields(values, limits)
    verdicts = ["meets the goals" if row["meets"] else "misses a goal" for row in rows]
    best = document["recommendation"]
    if best is not None:
        verdicts = [row["role"] if row["role"] in ("recommended", "best estimate") else text
                    for row, text in zip(rows, verdicts, strict=True)]  # fmt: skip
    fields = [
        Field("#verdict", "verdict", verdicts, "Whether it meets all goals with the wanted confidence", setting=True),
        Field("#layout", "layout", [row["layout"] for row in rows], "Prefill and decode together or apart",
              setting=True),
        Field("#engines", "engines", [row["parallelism"] for row in rows], "Kind of engine", setting=True),
        *setting_fields([row["settings"] for row in rows]),
        *metrics,
    ]  # fmt: skip
    known = {each.key for each in fields}
    views = []
    if {"user", "output_throughput_per_device"} <= known:
        views.append(View("throughput of a GPU against interactivity", "user", "output_throughput_per_device",
                          "#verdict", True))  # fmt: skip
    price = "cost_per_hour" if "cost_per_hour" in known else "devices"
    latency = next((key for key in limits if key in known), "ttft.p99")
    if latency in known:
        views.append(View("latency against cost", price, latency, "#verdict", True))
    return explorer(fields, views, [f"{row['devices']}, {row['parallelism']}" for row in rows]) if views else ""


def _metric(row: Document, key: str) -> float | None:
    known = {
        "devices": "gpus", "cost_per_hour": "cost_per_hour", "user": "tokens_per_second_per_user",
        "output_throughput_per_device": "tokens_per_second_per_gpu", "output_throughput": "output_throughput",
        "cost_per_million_output_tokens": "cost_per_million_output_tokens",
    }  # fmt: skip
    return row[known[key]] if key in known else at(row["summary"] or {}, key)


def _changes(changes: Sequence[Document]) -> str:
    rows = [
        [escape(each["change"]), "✓" if each["meets"] else "✗", percent(each["sure"]), percent(each["probability"]),
         escape(each["reason"])]
        for each in changes
    ]  # fmt: skip
    return table(["change", "goals", "sure", "hours", "why"], rows)


def _ledger(entries: Sequence[Document]) -> Part:
    """Every candidate, to sort and to filter by how it ended."""
    keys = list(dict.fromkeys(key for each in entries for key in each["settings"]))
    headers = ["status", "layout", "engines", *(key.rpartition(".")[2] for key in keys), "sizes", "GPUs", "cost/h",
               "reason"]  # fmt: skip
    rows = [
        [each["status"], each["layout"], each["parallelism"], *(each["settings"].get(key) for key in keys),
         "–" if each["sizes"] is None else " + ".join(map(str, each["sizes"])), each["gpus"], each["cost_per_hour"],
         each["reason"]]
        for each in entries
    ]  # fmt: skip
    return sortable(headers, rows, ["status", "layout", "engines"]) if rows else ""
