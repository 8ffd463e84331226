"""The report of a plan: a sentence, deployments, what would change it, and how every candidate ended."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from reports.blocks import (
    Block,
    Chart,
    Column,
    Curve,
    Document,
    Figure,
    Points,
    Report,
    Row,
    Shown,
    Table,
    Text,
    View,
    bullets,
)  # fmt: skip
from reports.fields import METRICS, Field, at, metric_fields, setting_fields

LATENCIES = ("ttft", "tpot", "itl", "e2e")
INTERVALS = (
    "±: half a 95 % interval of the mean over windows. Sure: share of the draws of the step times' error under which "
    "all goals hold (–: the error is unknown). Hours: share of hours like this one that meet them, if step times are "
    "as estimated."
)


def plan_report(document: Document) -> Report:
    """The answer, the best deployments, the changes, and how the candidates ended."""
    rows, headroom = document["rows"], document["headroom"]
    blocks = _answer(document)
    if document["feasible"] is False:
        blocks.append(_nearest(document))
    if rows:
        blocks += [Text("Deployments", "heading", detail=True), *_deployments(document, rows), *_explorer(document),
                   _pareto(document), *_capacity(document)]  # fmt: skip
    blocks += _confidence(document)
    if headroom:
        margin = "" if headroom["factor"] is None else f" ({100 * (headroom['factor'] - 1):+.0f} %)"
        blocks.append(
            Text(f"\nMax load: {headroom['rate']:.4g} requests/s{margin}. A little above: {headroom['beyond']}.")
        )
    if len(document.get("costs") or ()) > 1:  # more than the price that the table has
        blocks += costs_blocks(document["costs"])
    if document.get("what_if"):
        blocks += [Text("What if", "heading"), _what_if(document)]
    if document["changes"]:
        blocks += [Text("What would change it", "heading"), _changes(document["changes"])]
    blocks += [Text("Candidates", "heading"), bullets(ledger_lines(document)), _ledger(document["ledger"])]
    return Report(f"{document['name']}: a plan", blocks)


def load_report(document: Document) -> Report:
    """The rate that a deployment bears, in a sentence, and how its goals stand at that rate."""
    blocks = _answer(document)
    if document["feasible"]:
        blocks += [*_deployments(document, [document["deployment"]]), Text(f"A little above: {document['beyond']}.")]
    return Report(f"{document['name']}: max load", blocks)


def _answer(document: Document) -> list[Block]:
    head = [Text(f"{document['name']}: {document['note'].lower()}", "note"), Text(document["answer"], "answer")]
    return [*head, *(Text(sentence, "note") for sentence in document.get("measured_like", ()))]


def _deployments(document: Document, rows: Sequence[Document]) -> list[Block]:
    return [Text(""), _table(document, rows), Text(footnote(document), "note")]


def footnote(document: Document) -> str:
    window = document["question"]["window"]
    estimated = [str(i) for i, row in enumerate(document.get("rows", ()), 1) if row["role"] == "best estimate"]
    cheapest = f" Row {estimated[0]}: cheapest by the best estimate of the step times." if estimated else ""
    arrivals = str(document["question"]["arrivals"])
    return (
        f"{INTERVALS}{cheapest} {arrivals[:1].upper()}{arrivals[1:]}. Windows of {window['requests']:,} requests; "
        f"{window['warmup']:g} s at their begin do not count; all candidates get the same requests."
    )


def _table(document: Document, rows: Sequence[Document]) -> Table:
    settings = {key: _folded(key.rpartition(".")[2]) for key in rows[0]["settings"]}
    goals = list(document["question"]["goals"])
    numbers = {
        "$/h": ("cost_per_hour", 2, METRICS["cost_per_hour"].help),
        "$/M tokens": ("cost_per_million_output_tokens", 4, METRICS["cost_per_million_output_tokens"].help),
        "tok/s/GPU": ("tokens_per_second_per_gpu", 3, METRICS["output_throughput_per_device"].help),
        "tok/s/user": ("tokens_per_second_per_user", 3, METRICS["user"].help),
    }
    if all(row["cost_per_hour"] is None for row in rows):
        numbers = {title: number for title, number in numbers.items() if "$" not in title}
    nodes = any(row.get("nodes") for row in rows)  # none in runs of earlier versions
    columns = [
        Column(""), Column("GPUs", help=METRICS["devices"].help), Column("engines", help="Kind of engine"),
        *([Column("nodes", 2, help="Whole nodes, and the GPUs of each")] if nodes else []),
        *(Column(title, 1, help=f"Setting {key}") for key, title in settings.items()),
        *(Column(title, rank, help=meaning) for title, (_, rank, meaning) in numbers.items()),
        *(Column(goal, help="The value, half a 95 % interval, and whether the goal is met") for goal in goals),
        Column("sure", help="Share of the draws of the step times' error under which all goals hold"),
        Column("hours", help="Share of spans like this one that meet all goals, if step times are as estimated"),
    ]  # fmt: skip
    cells: list[Row] = [
        [str(index), row["devices"], row["parallelism"], *([nodes_cell(row)] if nodes else []),
         *(str(row["settings"][key]) for key in settings),
         *(Shown(_number(row[key]), row[key]) for key, _, _ in numbers.values()),
         *(goal_cell(row["goals"][i]) for i in range(len(goals))), percent(row["sure"]), percent(row["probability"])]
        for index, row in enumerate(rows, 1)
    ]  # fmt: skip
    return Table(columns, cells, fits=True)


def nodes_cell(row: Document) -> str:
    """The whole nodes of a deployment, as `2 of 8`."""
    return " + ".join(f"{group['count']} of {group['size']}" for group in row.get("nodes") or ()) or "–"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{math.floor(100 * share + 1e-9)} %"


def _folded(name: str, longest: int = 10) -> str:
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


def _changes(changes: Sequence[Document]) -> Table:
    rows: list[Row] = [
        [row["change"], "✓" if row["meets"] else "✗", percent(row["sure"]), percent(row["probability"]), row["reason"]]
        for row in changes
    ]
    columns = [Column("change", left=True), Column(""), Column("sure"), Column("hours"), Column("", left=True)]
    return Table(columns, rows)


def _confidence(document: Document) -> list[Block]:
    """Blocks on the cost of confidence and on alternatives; runs of earlier versions have none."""
    levels = document.get("confidence_curve") or []
    blocks: list[Block] = []
    if levels:
        rows: list[Row] = [
            ["best estimate" if level["confidence"] is None else percent(level["confidence"]), level["devices"] or "–",
             Shown(_number(level["cost_per_hour"]), level["cost_per_hour"]), percent(level["sure"])]
            for level in levels
        ]  # fmt: skip
        columns = [Column("confidence", left=True), Column("GPUs"), Column("$/h"), Column("sure")]
        blocks += [Text("What confidence costs", "heading"), Table(columns, rows)]
        places = sorted({(100 * level["sure"], level["gpus"]) for level in levels if level["sure"] is not None})
        curve = Curve("", [sure for sure, _ in places], [gpus for _, gpus in places], None, "both")
        chart = Chart("", [curve], "confidence, % of the draws of the step times", "GPUs")
        blocks.append(Figure("confidence", [chart], f"{document['name']}: GPUs over confidence", size=(6.4, 4.2)))
    if narrowing := document.get("narrowing"):
        lines = [f"{entry['about']}: measure {entry['measure']} ({entry['command']})" for entry in narrowing]
        blocks += [Text("What would narrow it, the most first", "heading"), bullets(lines)]
    if alternatives := document.get("alternatives"):
        blocks += [Text("Why not", "heading"), bullets([_loss(entry) for entry in alternatives])]
    return blocks


def _loss(entry: Document) -> str:
    devices = f" {entry['devices']}" if entry["devices"] else ""
    admission = f"; taken with {entry['admitted_by']}" if entry["admitted_by"] else ""
    return f"{entry['layout']}{devices}: {entry['why']}{admission}"


def _what_if(document: Document) -> Table:
    answers = [("as given", document["recommendation"])]
    answers += [(entry["what"], entry["recommendation"]) for entry in document["what_if"]]
    columns = [Column("what if", left=True), Column("GPUs"), Column("nodes", 2), Column("engines"), Column("$/h"),
               Column("sure"), Column("hours")]  # fmt: skip
    rows: list[Row] = [
        [what, "no candidate meets the goals", *[""] * 5] if row is None else
        [what, row["devices"], nodes_cell(row), row["parallelism"], Shown(_number(row["cost_per_hour"]),
         row["cost_per_hour"]), percent(row["sure"]), percent(row["probability"])]
        for what, row in answers
    ]  # fmt: skip
    return Table(columns, rows, fits=True)


def costs_blocks(costs: Sequence[Document]) -> list[Block]:
    """Blocks on the cost by commitment and beside an API; none without prices."""
    if not costs:
        return []
    columns = [Column("", left=True), Column("$/h"), Column("$/month", help="730 hours"),
               Column("whole nodes, $/h"), Column("an API costs as much at", help="Requests per second")]  # fmt: skip
    rows: list[Row] = [
        [row["commitment"], *(Shown("–" if row[key] is None else f"{row[key]:,.{digits}f}", row[key])
         for key, digits in (("per_hour", 2), ("per_month", 0), ("nodes_per_hour", 2))),
         "–" if row["break_even_rate"] is None else f"{row['break_even_rate']:.3g}/s"]
        for row in costs
    ]  # fmt: skip
    return [Text("Cost", "heading"), Table(columns, rows)]


def _nearest(document: Document) -> Text:
    miss = document["nearest_miss"]
    if miss is None:
        return bullets(list(dict.fromkeys(entry["reason"] for entry in document["ledger"]))[:5])
    settings = "".join(f", {key} {value}" for key, value in miss["settings"].items())
    return Text(f"Nearest miss: {miss['devices']} ({miss['parallelism']}{settings}). {miss['reason']}.", "warning")


def _explorer(document: Document) -> list[Block]:
    rows = document["rows"]
    values: dict[str, list[float | str | None]] = {key: [_metric(row, key) for row in rows] for key in METRICS}
    limits = {name.replace("_p", ".p").replace("_mean", ".mean"): limit
              for name, limit in document["question"]["goals"].items()}  # fmt: skip
    metrics = metric_fields(values, limits)
    verdicts = ["meets the goals" if row["meets"] else "misses a goal" for row in rows]
    if document["recommendation"] is not None:
        verdicts = [row["role"] if row["role"] in ("recommended", "best estimate") else verdict
                    for row, verdict in zip(rows, verdicts, strict=True)]  # fmt: skip
    fields = [
        Field("#verdict", "verdict", verdicts, "Whether it meets all goals with the wanted confidence", setting=True),
        Field("#layout", "layout", [row["layout"] for row in rows], "Prefill and decode together or apart",
              setting=True),
        Field("#engines", "engines", [row["parallelism"] for row in rows], "Kind of engine", setting=True),
        *setting_fields([row["settings"] for row in rows]),
        *metrics,
    ]  # fmt: skip
    keys = {field.key for field in fields}
    views = []
    if {"user", "output_throughput_per_device"} <= keys:
        views.append(View("throughput of a GPU against interactivity", "user", "output_throughput_per_device",
                          "#verdict", True))  # fmt: skip
    price = "cost_per_hour" if "cost_per_hour" in keys else "devices"
    latency = next((key for key in limits if key in keys), "ttft.p99")
    if latency in keys:
        views.append(View("latency against cost", price, latency, "#verdict", True))
    return [Points(fields, views, [f"{row['devices']}, {row['parallelism']}" for row in rows])]


def _metric(row: Document, key: str) -> float | None:
    names = {
        "devices": "gpus", "cost_per_hour": "cost_per_hour", "user": "tokens_per_second_per_user",
        "output_throughput_per_device": "tokens_per_second_per_gpu", "output_throughput": "output_throughput",
        "cost_per_million_output_tokens": "cost_per_million_output_tokens",
    }  # fmt: skip
    return row[names[key]] if key in names else at(row["summary"] or {}, key)


def _pareto(document: Document) -> Figure:
    """Throughput of a GPU against interactivity by layout, and the front of the deployments that meet the goals."""
    rows, best = document["rows"], document["recommendation"]
    curves = []
    for layout in ("colocated", "disaggregated", "afd"):
        for meets in (True, False):
            verdict = "meets the goals" if meets else "misses a goal"
            group = [row for row in rows if (row["layout"], row["meets"]) == (layout, meets)]
            curves.append(_places(f"{layout}, {verdict}", group, "points"))
    curves.append(_places("", pareto([row for row in rows if row["meets"]]), "solid"))
    if best is not None:
        curves.append(_places("recommended", [row for row in rows if row["name"] == best["name"]], "both"))
    chart = Chart(
        "", [curve for curve in curves if curve.x], "output tokens/s of a user (1 / mean TPOT)",
        "output tokens/s of a GPU", annotated=True,
    )  # fmt: skip
    title = f"{document['name']}: deployments at the given rate"
    return Figure("pareto", [chart], title, size=(6.4, 4.6), on_page=False)


def _capacity(document: Document) -> list[Block]:
    """The estimated rate at the goals over GPUs, and the simulated one; runs of earlier versions have none."""
    points, best, headroom = document.get("capacity") or [], document["recommendation"], document["headroom"]
    families: dict[str, list[Document]] = {}
    for point in points:
        families.setdefault(point["family"], []).append(point)
    curves = [
        Curve(f"{group[0]['layout']}, {group[0]['parallelism']}", [point["gpus"] for point in group],
              [point["rate"] for point in group], None, "steps")
        for group in families.values()
    ]  # fmt: skip
    if not curves:
        return []
    if best is not None and headroom is not None:
        curves.append(Curve("recommended, simulated", [best["gpus"]], [headroom["rate"]], None, "points"))
    chart = Chart("", curves, "GPUs", "requests/s at the goals, estimated")
    return [Figure("capacity", [chart], f"{document['name']}: rate over GPUs", size=(6.4, 4.6))]


def _places(label: str, rows: Sequence[Document], kind: str) -> Curve:
    rows = [row for row in rows if None not in _place(row)]
    x, y = [_place(row)[0] for row in rows], [_place(row)[1] for row in rows]
    return Curve(label, x, y, None, kind, names=[row["devices"] for row in rows] if kind == "points" else ())


def pareto(rows: Sequence[Document]) -> list[Document]:
    """The rows that no other one beats in both tokens/s per GPU and tokens/s per user, by the latter."""
    places = [row for row in rows if None not in _place(row)]
    best = [row for row in places if not any(_beats(_place(rival), _place(row)) for rival in places)]
    return sorted(best, key=_place)


def _place(row: Document) -> tuple[Any, Any]:
    return row["tokens_per_second_per_user"], row["tokens_per_second_per_gpu"]


def _beats(rival: tuple[float, float], place: tuple[float, float]) -> bool:
    return rival != place and rival[0] >= place[0] and rival[1] >= place[1]


def _ledger(entries: Sequence[Document]) -> Table:
    keys = list(dict.fromkeys(key for entry in entries for key in entry["settings"]))
    titles = ["status", "layout", "engines", *(key.rpartition(".")[2] for key in keys), "sizes", "GPUs", "cost/h",
              "reason"]  # fmt: skip
    rows: list[Row] = [
        [entry["status"], entry["layout"], entry["parallelism"],
         *(Shown("", entry["settings"].get(key)) for key in keys),
         "–" if entry["sizes"] is None else " + ".join(map(str, entry["sizes"])), Shown("", entry["gpus"]),
         Shown("", entry["cost_per_hour"]), entry["reason"]]
        for entry in entries
    ]  # fmt: skip
    return Table([Column(title) for title in titles], rows, sorts=True, filters=titles[:3], detail=True)


def ledger_lines(document: Document) -> list[str]:
    """Counts of candidates by their status, with the most frequent reason of each kind, and what was not tried."""
    entries = document["ledger"]
    evaluated = document["evaluated"]
    lines = [f"{len(entries):,} candidates: {evaluated:,} evaluated by simulation, {len(entries) - evaluated:,} pruned"]
    for status, count in Counter(entry["status"] for entry in entries).most_common():
        reasons = Counter(entry["reason"] for entry in entries if entry["status"] == status and entry["reason"])
        common = reasons.most_common(1)
        lines.append(f"{count} {status}" + (f"; for example: {common[0][0]}" if common else ""))
    return [*lines, *document.get("notes", ())]  # none in runs of earlier versions


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
