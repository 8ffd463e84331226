"""The reports of `twin validate` of engines, pools and bundles: measured beside predicted, and the verdict."""

from __future__ import annotations

from typing import TypeAlias

from reports.blocks import (
    Block,
    Chart,
    Curve,
    Document,
    Figure,
    Report,
    Table,
    Text,
    bullets,
    distribution,
    percent,
    rows_table,
    table,
    timeline,
)
from reports.fields import LATENCIES, SHARES
from reports.theme import MEASURED, PREDICTED, SOFT, WAITING

Style: TypeAlias = tuple[str, float, int]
TIMES = ("ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p99", "itl.p99", "e2e.mean", "e2e.p99")
METRICS = {
    **{name: (f"{name.partition('.')[0].upper()} {name.partition('.')[2]}, ms", 1e3, 2) for name in TIMES},
    "output_throughput": ("output throughput, tokens/s", 1.0, 1),
    "sessions.time.mean": ("time to a session's last answer, s", 1.0, 3),
    "sessions.waited.mean": ("of it waiting for answers, s", 1.0, 3),
    "sessions.resent_cached": ("resent cached", 1.0, 3),
    "speculation.acceptance_rate": ("acceptance rate", 1.0, 3),
    "speculation.tokens_per_decode": ("tokens per decode", 1.0, 3),
    "fleet.goals_met": ("requests that meet the goals, %", 100.0, 1),
    "fleet.periods_met": ("periods that meet the goals, %", 100.0, 1),
    "fleet.engine_seconds": ("engine-seconds", 1.0, 1),
}
"""Metrics with their labels, factors of their units, and digits."""

CLOCKS = {
    "wall": "wall (arrivals are waited for)",
    "direct": "direct (CPU time of the engine's own computation; waits for arrivals are skipped)",
}


def validation_report(document: Document) -> Report:
    """Metrics of each load with their distributions, steps by kind of batch, the worst steps, and missed goals."""
    blocks: list[Block] = [Text("How it was measured", "heading"), Text("\n".join(headline(document)))]
    for load in document["loads"]:
        rate = f"{load['rate']:.2f} {document['arriving']}/s"
        title = f"Load {load['load']:g}: {rate}, {load['requests']} requests a repeat"
        blocks += [Text(title, "heading"), _metrics(load), latencies(load, document)]
    if any(name.startswith("speculation.") for load in document["loads"] for name in load["metrics"]):
        blocks += [Text("Drafts that were accepted, by position", "heading"), _drafts(document)]
    blocks += [Text("Steps: |forecast / measured - 1|", "heading"), _steps(document)]
    blocks += [Text("Steps with the largest errors", "heading"), _worst(document)]
    if document.get("coverage"):
        blocks += [Text("Coverage", "heading"), Text(coverage(document))]
    blocks += [Text("Over time", "heading", detail=True), over_time(document), *verdict_blocks(document, "forecast")]
    return Report(f"{document['name']}: predicted and measured", blocks)


def latencies(load: Document, document: Document) -> Figure:
    """A distribution of each latency, measured and forecast."""
    charts = []
    for name, (label, meaning) in LATENCIES.items():
        samples, colours = {}, []
        for side, (text, colour, _) in SIDES.items():
            values = load["curves"][side].get(name)
            if values:
                samples[text] = (values, [index / max(len(values) - 1, 1) for index in range(len(values))])
                colours.append(colour)
        if samples:
            charts.append(distribution(f"{label}: {meaning.partition(':')[0]}", samples, label, colours=colours))
    rate = f"{load['rate']:.1f} {document['arriving']}/s"
    title = f"load {load['load']:g}: {rate}; clock: {document['clock']}"
    return Figure(f"latencies-{load['load']:g}", charts, title, columns=2)


def over_time(document: Document) -> Figure:
    charts = []
    for load in document["loads"]:
        line = load["timeline"]
        curves = [Curve(label, line["time"], line[side], colour, "steps") for side, (label, colour, _) in SIDES.items()]
        charts.append(timeline(f"Requests in the system, load {load['load']:g}", curves, "requests"))
        if load.get("engines"):
            charts.append(timeline(f"Engines, load {load['load']:g}", _engines(load["engines"][0]), "engines"))
    title = f"{document['name']}; clock: {document['clock']}"
    return Figure("over-time", charts, title, size=(7.6, 2.6 * len(charts)))


def _engines(changes: Document) -> list[Curve]:
    return [
        Curve(label, [row[0] for row in changes[side]], [sum(row[1:]) for row in changes[side]], colour, "steps")
        for side, (label, colour, _) in SIDES.items()
    ]


def headline(document: Document) -> list[str]:
    """The device, the model, the accuracy of the step-time model, and what the errors mean."""
    steps, backend = document["calibration"], document["backend"]
    median, p90, repeats = (
        f"{100 * steps[name]:.1f} %" for name in ("heldout_median_error", "heldout_p90_error", "repeat_spread")
    )
    in_turns = ["forecast by a profile of other requests, in turns with the replays"]
    return [
        f"{document['name']}: {document['scenario']['model']['path']} ({backend['dtype']}) on {backend['device']}",
        f"steps: {steps['provenance']['source']}; error on held-out steps {median} in the median, {p90} at P90;"
        f" equal steps differ by {repeats}, rounds by {100 * steps.get('round_spread', 0.0):.1f} %",
        f"predicted capacity: {document['capacity']:.2f} {document['arriving']}/s. {document['note']}",
        f"clock: {CLOCKS[document['clock']]}",
        *(in_turns if document["profiled"] == "in turns" else []),
        contention_line(document["contention"]),
    ]


def coverage(document: Document) -> str:
    """The share of measured values that lie in the forecast's intervals."""
    values = document["coverage"]
    share = 100 * values["inside"] / values["values"]
    return (
        f"{values['inside']} of {values['values']} measured values of metrics with goals ({share:.0f} %) lie in the"
        " model's 95 % intervals around the forecasts for their own requests"
    )


def _metrics(load: Document) -> Table:
    drafts = ("drafts",) if any("drafts" in entry.get("parts", {}) for entry in load["metrics"].values()) else ()
    judged = any(entry.get("inside") is not None for entry in load["metrics"].values())
    expected = ("forecast interval", "sampling", "model", *drafts, "inside") if judged else ()
    rows = table("", "measured", "repeat spread", "forecast", *ERRORS, *expected)
    for name, style in METRICS.items():
        entry = load["metrics"].get(name)
        if entry is not None:
            cells = _cells(entry, style, f"{100 * entry['repeat_spread']:.1f} %", name in SHARES)
            more = _expected(style, entry, len(load["measured"]), drafts) if expected else ()
            rows.add_row(style[0], *cells, *more)
    return rows


ERRORS = ("error", "95 % interval", "goal")


def _cells(entry: Document, style: Style, spread: str, share: bool) -> tuple[str, ...]:
    low, high = (_error(end, share) for end in entry["interval"])
    goal = "" if entry["goal"] is None else f"{100 * entry['goal']:g} {'points' if share else '%'}"
    error = _error(entry["error"], share)
    return _value(style, entry["measured"]), spread, _value(style, entry["predicted"]), error, f"{low} … {high}", goal


def _value(style: Style, value: float) -> str:
    _, factor, digits = style
    return f"{factor * value:.{digits}f}"


def _error(error: float, share: bool) -> str:
    return f"{100 * error:+.1f} points" if share else percent(error)


def _expected(style: Style, entry: Document, repeats: int, drafts: tuple[str, ...]) -> tuple[str, ...]:
    """The forecast's own interval, the deviations in it, and the repeats that the model's part contains."""
    if entry.get("inside") is None:
        return ("", "", "", *("" for _ in drafts), "")
    low, high = entry["forecast_interval"]
    sampling, model = (entry["parts"][part] for part in ("sampling", "model"))
    return (
        f"{_value(style, low)} to {_value(style, high)}",
        "" if sampling is None else f"{100 * sampling:.1f} %",
        f"{100 * model:.1f} %",
        *(f"{100 * entry['parts'][part]:.1f} %" for part in drafts),
        f"{entry['inside']} of {repeats}",
    )


def _drafts(document: Document) -> Table:
    rows = table("load", "", "decodes with a draft", "accepted, by position")
    for load in document["loads"]:
        for title, key in (("measured", "measured"), ("forecast", "predicted")):
            runs = [repeat["speculation"] for repeat in load[key]]
            drafts, decodes = (sum(run[name] for run in runs) for name in ("num_drafts", "num_decodes"))
            positions = zip(*(run["num_accepted_tokens_per_pos"] for run in runs), strict=True)
            shares = ", ".join(f"{100 * sum(counts) / max(drafts, 1):.0f} %" for counts in positions)
            rows.add_row(f"{load['load']:g}", title, f"{100 * drafts / max(decodes, 1):.0f} %", shares)
    return rows


def _steps(document: Document) -> Table:
    return rows_table(
        "load | kind | steps | seconds | median | P90 | bias",
        "{load:g} | {kind} | {steps} | {seconds:.2f} | {median:100 .1f} % | {p90:100 .1f} % | {bias:100 +.1f} %",
        [
            {"load": load["load"], "kind": kind, **entry}
            for load in document["loads"]
            for kind, entry in ({"all": load["steps"]["all"]} | load["steps"]["by_kind"]).items()
        ],
    )


def _worst(document: Document) -> Table:
    return rows_table(
        "load | batch | measured, ms | forecast, ms",
        "{load:g} | {batch} | {measured:1e3 .1f} | {predicted:1e3 .1f}",
        [step | {"load": load["load"]} for load in document["loads"] for step in load["steps"]["worst"][:3]],
    )


SIDES = {"live": ("measured", MEASURED, "solid"), "twin": ("forecast", PREDICTED, "dashed")}
"""Label, colour and line of each side."""


def verdict_blocks(document: Document, side: str) -> list[Block]:
    """The goals that the prediction (`side`) misses, and the verdict."""
    missed = document["missed"]
    return [
        Text(f"Goals that the {side} misses", "heading"), bullets(missed) if missed else Text("none"),
        Text("\n\n" + verdict_line(document), "warning" if missed else "answer"),
    ]  # fmt: skip


def verdict_line(document: Document) -> str:
    """A sentence: the goals are met or missed, or a contended machine leaves it undecided."""
    missed = len(document["missed"])
    if not missed:
        return "Verdict: all goals are met."
    goals = f"{missed} goal{'s' * (missed > 1)}"
    if document["verdict"] != "undecided":
        return f"Verdict: {goals} missed."
    reasons = "; ".join(document["contention"]["reasons"])
    return (
        f"Verdict: undecided. {goals} missed, but other programs disturbed the measurement: {reasons}."
        " Repeat it with --fresh on an idle machine."
    )


def contention_line(contention: Document) -> str:
    """The contention that was measured."""
    waits = contention["waited_share"]
    waits_note = "" if waits is None else f"waits for a processor {100 * waits:.1f} %, "
    joules = contention.get("package_joules")
    energy = "" if joules is None else f"; the processors drew {joules:.0f} J, whatever ran on them"
    return (
        f"contention: {waits_note}involuntary switches {contention['involuntary_switches_per_second']:.1f} a second,"
        f" CPU time of equal work spread by {100 * contention['equal_work_spread']:.1f} %"
        f" ({'contended' if contention['contended'] else 'not contended'}){energy}"
    )


BUNDLE_METRICS = {
    "throughput": ("throughput, tokens/s per instance", 1.0, 1),
    "tpot": ("TPOT, ms", 1e3, 2),
    "idle_attention": ("attention idle, %", 100.0, 1),
    "idle_ffn": ("FFN idle, %", 100.0, 1),
    "transfer_attention_to_ffn": ("a message to the FFN, µs", 1e6, 1),
    "transfer_ffn_to_attention": ("a message back, µs", 1e6, 1),
}

THEORIES = {"barrier": ("theory with barrier", WAITING), "published": ("theory as published", SOFT)}
RATIOS = {"measured": "live", "predicted": "twin", **{name: label for name, (label, _) in THEORIES.items()}}


def bundle_report(document: Document) -> Report:
    """Measured beside predicted at each ratio, the best ratio of each side, and the goals that were missed."""
    blocks: list[Block] = [Text("How it was measured", "heading"), Text("\n".join(bundle_headline(document)))]
    for name, (label, _, _) in BUNDLE_METRICS.items():
        blocks += [Text(label, "heading"), _metric(document, name)]
    blocks += [Text("Best ratio", "heading"), _best(document), *bundle_figures(document)]
    blocks += verdict_blocks(document, "prediction")
    return Report(f"{document['name']}: predicted and measured", blocks)


def bundle_figures(document: Document) -> list[Block]:
    """Throughput, TPOT and idle shares over the ratio, and tokens over time at the measured optimum."""
    entries = document["ratios"]
    ratios = [entry["ratio"] for entry in entries]
    theories = [
        Curve(label, ratios, [entry["theory"][name] for entry in entries], colour, "dashed")
        for name, (label, colour) in THEORIES.items()
    ]
    panels = [("Throughput", "throughput", 1.0, "tokens/s per instance")]
    if all("tpot" in entry["metrics"] for entry in entries):
        panels.append(("TPOT", "tpot", 1e3, "TPOT, ms"))
    panels += [(f"Idle share, {label}", f"idle_{role}", 100.0, "idle time, %")
               for role, label in (("attention", "attention"), ("ffn", "FFN"))]  # fmt: skip
    charts = []
    for title, name, factor, unit in panels:
        curves = [
            Curve(label, ratios, [factor * entry["metrics"][name][side] for entry in entries], colour, "both")
            for side, label, colour in (("measured", "live", MEASURED), ("predicted", "twin", PREDICTED))
        ]
        curves += theories if name == "throughput" else []
        charts.append(Chart(title, curves, "attention instances per FFN instance, r", unit))
    best = document["best_ratio"]["measured"]
    line = document["timelines"][str(best)]
    curves = [Curve(label, line["time"], line[side], colour, style) for side, (label, colour, style) in SIDES.items()]
    clock = f"{document['name']}; clock: {document['clock']}"
    over_time = timeline(f"Tokens over time, {best}A-1F", curves, "tokens")
    return [
        Figure("ratios", charts, clock, columns=2, size=(9.0, 6.4)),
        Figure("over-time", [over_time], clock, size=(7.2, 4.2)),
    ]


def bundle_headline(document: Document) -> list[str]:
    backend, scenario = document["backend"], document["scenario"]
    system = scenario["system"]
    return [
        f"{document['name']}: {scenario['model']['path']} ({backend['dtype']}) on {backend['device']}",
        f"B = {system['batch_size']}, {system['microbatches']} microbatches, {scenario['requests']} requests a"
        f" repeat, {scenario['repeats']} repeats",
        f"clock: {document['clock']} (CPU time of each role's own computation). {document['note']}",
        contention_line(document["contention"]),
    ]


def _metric(document: Document, name: str) -> Table:
    style = BUNDLE_METRICS[name]
    rows = table("", "measured", "repeat spread", "predicted", *ERRORS)
    for entry in document["ratios"]:
        metric = entry["metrics"].get(name)
        if metric is not None:
            spread, share = _value(style, metric["repeat_spread"]), style[1] == 100.0
            rows.add_row(entry["topology"], *_cells(metric, style, spread, share))
    return rows


def _best(document: Document) -> Table:
    rows = table("", "r*", "continuous r*", "measured throughput lost")
    for side, label in RATIOS.items():
        theory = document["theory"].get(side)
        rows.add_row(
            label,
            str(document["best_ratio"][side]),
            f"{theory['r_star']:.2f}" if theory else "",
            f"{100 * document['regrets'][side]:.1f} %",
        )
    return rows
