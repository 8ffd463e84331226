"""The report of a day: the best fixed and the best autoscaled fleet, and what a minute of start-up is worth."""

from __future__ import annotations

from reports.blocks import Block, Chart, Column, Curve, Document, Figure, Report, Row, Shown, Table, Text, texts

KINDS = {"fixed": "fixed size", "scaled": "autoscaled"}


def day_report(document: Document) -> Report:
    """The answer, the cheapest fleets that hold the goals and those that miss them, and a chart of all."""
    question = document["question"]
    goals = ", ".join(f"P99 {name.upper()} ≤ {limit:g} s" for name, limit in question["goals"].items())
    about = (
        f"{question['mean_rate']:.3g} requests/s in the mean and {question['peak_rate']:.3g} in the busiest minute; "
        f"{goals} in {question['minutes']:.0%} of the minutes; days simulated: {question['replications']}"
    )
    blocks: list[Block] = [Text(f"{document['name']}: {about}", "note"), *texts(_answer(document)), _table(document)]
    blocks.append(_chart(document))
    blocks.append(Text(document["note"], "note"))
    return Report(f"{document['name']}: fleets for a day", blocks)


def _answer(document: Document) -> list[str]:
    """The best fleets in sentences."""
    unit, lines = document["unit"], []
    for kind, title in KINDS.items():
        fleet = document[kind]
        if fleet is None:
            lines.append(f"No {title} fleet of at most {document['question']['max_engines']} engines holds the goals.")
            continue
        lines.append(
            f"Best {title} fleet: {name(fleet)}, {unit} {fleet['objective']:.4g} a day, goals held in "
            f"{fleet['minutes']:.1%} of the minutes (worst day {fleet['worst_day']:.1%})."
        )
    fixed, scaled = document["fixed"], document["scaled"]
    if fixed and scaled:
        saved = 1 - scaled["objective"] / fixed["objective"]
        lines.append(f"Autoscaling saves {saved:.1%}." if saved >= 0 else f"Autoscaling costs {-saved:.1%} more.")
    return lines + _start_up(document)


def _start_up(document: Document) -> list[str]:
    """The worth of a minute of start-up."""
    start_up = document["start_up"]
    if start_up is None:
        return []
    sooner, later = start_up["sooner"], start_up["later"]
    costs = [
        f"{part['seconds']:g} s: " + ("goals missed" if part["fleet"] is None else f"{part['fleet']['objective']:.4g}")
        for part in (sooner, {"seconds": start_up["seconds"], "fleet": document["scaled"]}, later)
    ]
    text = f"Cheapest fleet of this kind ({document['unit']} a day) by start-up: {', '.join(costs)}"
    if sooner["fleet"] and later["fleet"]:
        minutes = (later["seconds"] - sooner["seconds"]) / 60
        worth = (later["fleet"]["objective"] - sooner["fleet"]["objective"]) / minutes
        text += f"; a minute less is worth {worth:.3g} a day"
    return [f"{text}."]


def name(fleet: Document) -> str:
    """A fleet in words."""
    what = f"{fleet['value']:g} engines" if fleet["family"] == "fixed" else f"{fleet['family']} {fleet['value']:g}"
    return f"{what} ({fleet['tenure']})"


def _table(document: Document) -> Table:
    columns = [
        Column("fleet", left=True), Column("held", help="Goals are held in the wanted share of minutes"),
        Column("minutes", help="Share of minutes in which goals were met"), Column("worst day"),
        Column(document["unit"], help="A day, by the second that an engine is paid for"),
        Column("engine-hours"), Column("kWh", help="Estimated from power limits"),
        Column("most engines"), Column("started"),
        *(Column(f"{metric.upper()} P99", 2) for metric in document["question"]["goals"]),
    ]  # fmt: skip
    rows: list[Row] = [
        [name(row), "✓" if row["holds"] else "✗", f"{row['minutes']:.1%}", f"{row['worst_day']:.1%}",
         Shown(f"{row['objective']:.4g}", row["objective"]), f"{row['engine_hours']:.4g}",
         "–" if row["kwh"] is None else f"{row['kwh']:.3g}",
         f"{row['most_engines']:g}", f"{row['started']:g}",
         *(f"{row[f'{metric}_p99']:.3g} s" for metric in document["question"]["goals"])]
        for row in document["rows"]
    ]  # fmt: skip
    return Table(columns, rows, fits=True, sorts=True)


def _chart(document: Document) -> Figure:
    """Minutes that met the goals over cost, fixed and scaled."""
    curves = []
    for kind, title in KINDS.items():
        rows = sorted(
            (row for row in document["rows"] if (row["family"] == "fixed") == (kind == "fixed")),
            key=lambda row: float(row["objective"]),
        )
        xs, ys = [row["objective"] for row in rows], [100 * row["minutes"] for row in rows]
        curves.append(Curve(title, xs, ys, kind="points"))
    chart = Chart("", curves, f"{document['unit']} a day", "minutes with goals met, %", from_zero=False)
    return Figure("day", [chart], "Fleets for a day")
