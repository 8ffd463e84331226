"""Measured, refined and fitted step times, for a terminal."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from reports.blocks import Block, Column, Document, Report, Table, Text, percent, table, texts, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    lines = operation["lines"]
    if len(lines) == 1:
        return (
            f"{lines[0]['alpha'] * 1e6:.3g} µs a {operation['axis'].removesuffix('s')} + {lines[0]['beta'] * 1e6:.3g}"
        )
    knees = len(lines) - len({line["where"] for line in lines})
    return f"{len(lines)}, {knees} knee{'s' * (knees != 1)}" if lines else ""


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"


TITLES = {
    "ttft.mean": "TTFT", "itl.mean": "ITL", "tpot.mean": "TPOT", "e2e.mean": "E2E",
    "output_throughput": "output tokens/s", "request_throughput": "requests/s",
}  # fmt: skip


def refinement_report(document: Document) -> Report:
    """Unknowns with the verdict on each, then the errors of what was fitted and of what was held out."""
    fitted, held_out, kind = document["fitted"], document["held_out"], document["kind"]
    learned = f"{fitted} of {fitted + held_out}" if document.get("spread") else f"the first {fitted}"
    basis = f"{learned} {kind}, {held_out} held out"
    if kind == "means":
        basis = f"the mean of {document['learned_from'].partition('.')[0].upper()} of {fitted} requests"
        basis += f", {held_out} held out" if held_out else ""
    blocks: list[Block] = [Text(f"{document['run']}: learned from {basis}", "answer"), _unknowns(document["unknowns"])]
    mean = document["mean_factor"]
    if abs(math.log(mean["factor"])) > mean["deviation"]:
        text = f"mean steps are {mean['factor']:.3f} times typical ones (± {100 * mean['deviation']:.1f} %)"
        blocks += [Text(text)]
    if kind == "steps":
        blocks += [_steps(document)]
    else:
        for name, title in (("fit", learned), ("rest", f"the other {held_out}")):
            if document[name]:
                blocks += [Text(f"\n{title}, means"), _errors(document[name])]
    if kind == "means":
        blocks += [_bucket(name, row) for name, row in document["buckets"].items()]
    return Report(document["run"], blocks)


def _unknowns(unknowns: list[Document]) -> Table:
    rows = table("what", "factor", "deviation before", "after", "")
    for unknown in unknowns:
        before = unknown["deviation_before"]
        rows.add_row(
            f"{unknown['name']}: {unknown['about']}",
            f"{unknown['factor']:.3f}" if unknown["factor"] else f"score {unknown['score']:+.2f}",
            f"{100 * before:.1f} %" if before else "",
            f"{100 * before * unknown['left']:.1f} %" if before else f"{100 * unknown['left']:.0f} % of it",
            _verdict(unknown),
        )
    return rows


def _verdict(unknown: Document) -> str:
    if unknown["verdict"] == "tied":
        partners = ", ".join(unknown["tied"])
        return f"tied to {partners}: only their sum is known" if partners else "tied to others"
    return str(unknown["verdict"])


def _errors(errors: Document) -> Table:
    errors_table = table("", "measured", "before", "error", "refined", "error", "95 % of it")
    inside = 0
    for name, row in errors.items():
        interval = row["interval"]
        inside += bool(interval and interval[0] <= row["measured"] <= interval[1])
        show = "{:.1f}".format if name.endswith("throughput") else time_text
        errors_table.add_row(
            TITLES.get(name, name), show(row["measured"]), show(row["before"]), percent(row["before_error"]),
            show(row["after"]), percent(row["after_error"]),
            f"{show(interval[0])} to {show(interval[1])}" if interval else "",
        )  # fmt: skip
    errors_table.caption = f"{inside} of {len(errors)} measured values lie in their intervals"
    return errors_table


def _bucket(name: str, row: Document) -> Text:
    metric, _, quantile = name.partition(".")
    edges = f"between {time_text(row['low'])} and {time_text(row['high'])}" if row["high"] else f"above {row['low']} s"
    predicted = f"{time_text(row['before'])} before, {time_text(row['after'])} refined"
    return Text(f"{quantile.upper()} of {metric.upper()} lies {edges}, by its bucket; {predicted}")


def _steps(document: Document) -> Text:
    row = document["rest"]["step"] if document["rest"] else None
    if row is None:
        return Text("no step was held out")
    return Text(
        f"the other {document['held_out']} steps: median error {100 * row['before_median']:.1f} % before (mean "
        f"{percent(row['before_error'])}), {100 * row['after_median']:.1f} % refined ({percent(row['after_error'])})"
    )


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


SHOWN = 10
"""Windows at the end of a series that are listed."""


def watch_report(document: Document) -> Report:
    """The verdict on a watched engine, then its last windows."""
    windows = document["windows"][-SHOWN:]
    rows = table("until (UTC)", "ITL measured", "expected", "difference", "decoding", "prompt tokens/s")
    for window in windows:
        rows.add_row(
            f"{datetime.fromtimestamp(window['end'], UTC):%Y-%m-%d %H:%M:%S}",
            f"{1e3 * window['measured']:.2f} ms",
            f"{1e3 * window['measured'] / math.exp(window['excess']):.2f} ms",
            percent(math.expm1(window["excess"])),
            f"{window['decoding']:.1f}",
            f"{window['prompt_rate']:.0f}",
        )
    title = f"{document['scenario']}: {document['verdict']}"
    blocks: list[Block] = [Text(f"{document['scenario']}: {_watched(document)}", "answer")]
    return Report(title, [*blocks, rows] if windows else blocks)


def _watched(document: Document) -> str:
    if "offset" not in document:
        return (
            f"undecided: {document['pages']} pages have {document.get('learned', 0)} windows of"
            f" {document['window']:g} s with answers, too few to learn from"
        )
    basis = (
        f"at equal load the engine's first {document['learned']} windows differ by"
        f" {percent(document['offset'])} from the scenario"
    )
    alarm = document.get("alarm")
    if alarm is None:
        return (
            f"{document['verdict']}: {basis}; no drift of {100 * document['drift']:g} % since, which is found after"
            f" {document['minutes_to_find']:.1f} minutes on average"
        )
    low, high = (percent(value) for value in alarm["interval"])
    text = (
        f"drifted: since {datetime.fromtimestamp(alarm['since'], UTC):%Y-%m-%d %H:%M:%S} UTC latency is"
        f" {percent(alarm['change'])} ({low} to {high}) off what it was; {basis}"
    )
    if alarm["cause"] == "requests":
        changes = (f"{percent(value)} {name}" for name, value in alarm["lengths"].items())
        text += f"; lengths of requests changed, too ({', '.join(changes)} on average): the scenario's workload is old"
    return text


COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8a5fbf", "#d1495b", "#4a4a4a")
HELD = "#000000"


def operation_figure(picture: Document) -> str:
    """One operation as SVG text: `measured` and `held` as [x, seconds, …], its `lines`, and its errors."""
    from reports.svg import canvas, svg_text

    figure, (times, errors) = canvas(2, 1, (6.4, 5.0), sharex=True, height_ratios=(2, 1))
    values = sorted({point[2] for point in picture["measured"]})
    colours = {value: COLOURS[i % len(COLOURS)] for i, value in enumerate(values)}
    for value in values:
        _series(times, errors, picture, value, colours[value])
    unseen = picture["held"]
    if unseen:
        times.plot([x for x, _, _ in unseen], [1e6 * t for _, t, _ in unseen], "x", color=HELD, ms=5, label="held out")
        errors.plot([x for x, _, _ in unseen], [100 * (guess / t - 1) for _, t, guess in unseen], "x", color=HELD, ms=5)
    times.set_ylabel("µs")
    times.set_xscale("symlog", base=2, linthresh=1)
    times.set_yscale("log")
    times.set_title(_title(picture), loc="left", fontsize=9)
    times.legend(fontsize=7, frameon=False)
    errors.axhline(0, color="#bbbbbb", lw=0.8)
    for limit in (-100 * picture["allowed"], 100 * picture["allowed"]):
        errors.axhline(limit, color="#bbbbbb", lw=0.8, ls=":")
    errors.set_ylabel("predicted − measured, %")
    errors.set_xlabel(picture["axis"])
    return svg_text(figure)


def _series(times: Axes, errors: Axes, picture: Document, value: int, colour: str) -> None:
    points = sorted(point for point in picture["measured"] if point[2] == value)
    where = f"{picture['fixed']} {value}" if picture["fixed"] else ""
    times.plot([x for x, _, _ in points], [1e6 * t for _, t, _ in points], "o", ms=3.5, color=colour,
               label=where or "measured")  # fmt: skip
    for line in picture["lines"]:
        if line["where"] != where:
            continue
        low, high = line["range"]
        inside = [(x, t) for x, t, _ in points if low <= x <= high]
        fitted = [line["alpha"] * x + line["beta"] for x, _ in inside]
        times.plot([x for x, _ in inside], [1e6 * t for t in fitted], "-", lw=1.2, color=colour)
        residuals = [100 * (guess / t - 1) for guess, (_, t) in zip(fitted, inside, strict=True)]
        errors.plot([x for x, _ in inside], residuals, "o", ms=3, mfc="none", color=colour)


def _title(picture: Document) -> str:
    held_out = picture.get("held_out")
    median = f"held-out median {100 * held_out['median']:.1f} %, " if held_out else ""
    limit = f"allowed {100 * picture['allowed']:.0f} %"
    return (
        f"{picture['name']} ({picture['via']}): {median}{limit}; repeats within {100 * picture['repeat_spread']:.1f} %"
    )
