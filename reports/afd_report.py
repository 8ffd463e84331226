"""The report of a ratio sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Shown,
    Table,
    Text,
    View,
    texts,
)
from reports.fields import Field, fixed, in_words, setting_fields, varying
from reports.theme import GOAL, SERIES, SOFT, series_colours

MANY = 10
"""Configurations from which on charts leave out theories, and the page the gaps: the explorer has the points."""

POINT_COLUMNS = {
    "ratio": ("r", "Attention instances for one FFN instance", 0),
    "topology": ("bundle", "Attention and FFN instances", 0),
    "cards": ("cards", "Cards of the whole bundle", -1),
    "throughput_per_card_steady": ("steady state per card", "Output tokens per time unit and card", 1),
    "throughput_per_instance": ("throughput, eq. 21", "Per instance, of the first 80 % of requests to complete", 1),
    "throughput_per_instance_steady": ("steady state", "Output tokens per time unit and instance", 1),
    "throughput_per_instance_theory": ("theory as published", "Eq. 6, per instance", 1),
    "throughput_per_instance_barrier": ("barrier-aware theory", "Per instance, with barrier and pipeline", 1),
    "tpot": ("TPOT, eq. 22", "Mean over requests of (completion − first token)/D", -1),
    "idle_attention": ("attention idle", "Eq. 23, share of the time", -1),
    "idle_ffn": ("FFN idle", "Eq. 23, share of the time", -1),
    "attention_memory": ("attention card, bytes", "Weights and KV cache on an attention card", -1),
    "regime": ("regime", "The stage that sets the published cycle time", 0),
    "fits": ("fits in memory", "Whether attention and FFN cards hold weights and cache", 0),
}
"""Fields of a point: label, meaning, and whether more or less is better."""


def sweep_report(document: Document) -> Report:
    """The recommendations of theory and simulation for each configuration, and its points."""
    configurations = document["configurations"]
    settings = [configuration["settings"] for configuration in configurations]
    keys, shared = varying(settings), fixed(settings)
    blocks: list[Block] = [Text(f"All with {shared}.")] if shared else []
    for index, configuration in enumerate(configurations):
        blocks.append(Text(headline(configuration, keys), "answer"))
        blocks += texts(memory_lines(configuration), "note")
        blocks.append(Points((), (), table=_table(_points_of(document, index), document["time_unit"], configuration)))
    blocks += [*sweep_charts(document), Text("Points", "heading", detail=True), _explorer(document)]
    for index, configuration in enumerate(configurations if len(configurations) <= MANY else ()):
        name = in_words(configuration["settings"], keys)
        blocks.append(Text(f"Theory: {name}" if name else "Theory", "heading", detail=True))
        blocks += _gaps(_points_of(document, index), document)
        values = [(key, Shown("", value)) for key, value in configuration["theory"].items()]
        columns = [Column("quantity"), Column("value")]
        blocks.append(Table(columns, [*values], title="Closed forms", detail=True))
    calibration = document["calibration"]
    origin = f"{document['note']} Calibration: {calibration['name']} ({calibration['method']})."
    blocks += [Text(footnote(document), "note"), Text(origin, "note", detail=True)]
    return Report(f"{document['name']}: sweep over A/F ratios", blocks)


def _points_of(document: Document, index: int) -> list[Document]:
    points = [point for point in document["points"] if point["configuration"] == index]
    return sorted(points, key=lambda point: float(point["ratio"]))


def counts_cards(configuration: Document) -> bool:
    """True if instances have several cards, so that throughput per card and per instance differ."""
    cards = configuration["cards"]
    return bool(max(cards["attention"], cards["ffn"]) > 1)


def headline(configuration: Document, keys: Sequence[str]) -> str:
    """The answer in one line, which begins with the settings of `keys`.

    There are two lines, per card and per instance, unless instances have one card each. For a configuration that does
    not fit in memory, the line states the missing memory in place of a recommendation.
    """
    simulation, memory = configuration["simulation"], configuration["memory"]
    name = in_words(configuration["settings"], keys)
    text = f"{name}: " if name else ""
    if simulation["best_ratio"] is None:
        return f"{text}does not fit in memory: {memory['shortage'] or 'at no simulated ratio'}"
    if counts_cards(configuration):
        cards = configuration["cards"]
        text += f"per card ({cards['attention']} an attention, {cards['ffn']} an FFN instance): "
        text += f"{_recommended(configuration, '_per_card')}\nper instance: "
    text += _recommended(configuration, "")
    if simulation["idle_crossing"] is not None:
        text += f"; idle ratios cross at r = {simulation['idle_crossing']:.1f}"
    return text


def memory_lines(configuration: Document) -> list[str]:
    """The memory of weights and KV cache on a card, in one line; no line if it is not known."""
    memory = configuration["memory"]
    if memory is None:
        return []
    closed = configuration["scenario"]["workload"]["arrivals"]["process"] == "closed_loop"
    return [
        f"memory of a card: attention {_gb(memory['attention_p999'])} at P99.9 of its load "
        f"({_gb(memory['attention_mean'])} in the mean{'' if closed else ', both if every slot were full'}), "
        f"FFN {_gb(memory['ffn_weights'])}, of {_gb(memory['limit'])} "
        f"({memory['gpu_memory_utilization']:g} of {_gb(memory['capacity'])}); "
        f"largest batch_size that fits: {memory['largest_batch_size'] or 'none'}"
    ]


def _recommended(configuration: Document, unit: str) -> str:
    """The optima of theory and simulation, per instance (`unit` is empty) or `_per_card`."""
    theory, simulation = configuration["theory"], configuration["simulation"]
    text = f"r* = {theory['r_star' + unit]:.2f} ({theory['regime' + unit]})"
    if not unit and theory["r_star_renewal_interval"] is not None:
        low, high = theory["r_star_renewal_interval"]
        text += f", {theory['r_star_renewal']:.2f} by the trace's pairs of lengths (95 %: {low:.2f} to {high:.2f})"
    text += f", with barrier and pipeline {theory['r_star_barrier' + unit]:.2f}"
    if configuration["scenario"]["workload"]["arrivals"]["process"] != "closed_loop":
        memory = configuration["memory"]
        overfull = memory is not None and not memory["fits"]
        text += ", both if every slot were full" + (", which does not fit in memory" if overfull else "")
    low, high = simulation["best_range" + unit]
    text += f"; simulated best {simulation['best_topology' + unit]}"
    return text + (f" (r = {low:g} to {high:g} are alike)" if high > low else "")


def footnote(document: Document) -> str:
    unit = document["time_unit"]
    text = (
        f"Simulated. Throughput in output tokens per {unit[:-1]} and instance: eq. 21 over the first 80 % of requests; "
        "steady with its 95 % interval; theory as published (eq. 6); barrier-aware theory. "
        "Gap: barrier-aware theory over steady simulation."
    )
    if any(counts_cards(configuration) for configuration in document["configurations"]):
        text += f" Per card: steady throughput (else eq. 21) in output tokens per {unit[:-1]} and card of the bundle."
    if any(configuration["memory"] is not None for configuration in document["configurations"]):
        text += " Memory: of what weights and KV cache may take on an attention card; over means that it does not fit."
    if any(configuration["memory"] is None for configuration in document["configurations"]):
        text += " Memory is not checked without instances.memory and instances.kv_bytes_per_token."
    if any(configuration["cards"]["source"] == "assumed" for configuration in document["configurations"]):
        text += " One card an instance is assumed (instances.attention_cards, instances.ffn_cards)."
    return text


def _table(points: Sequence[Document], unit: str, configuration: Document) -> Table:
    """One row a point. The number beside each title is its rank: high ranks are left out first on a narrow terminal."""
    memory = configuration["memory"]

    def figure(name: str) -> Callable[[Document], str]:
        return lambda point: _number(point[name])

    def gap(point: Document) -> str:
        steady, barrier = point["throughput_per_instance_steady"], point["throughput_per_instance_barrier"]
        return "–" if steady is None or barrier is None else f"{100 * (barrier / steady - 1):+.2f}"

    def half_width(point: Document) -> str:
        low, high = point["throughput_ci"] or (0.0, 0.0)
        return f"{50 * (high - low) / point['throughput_per_instance_steady']:.2f}" if high else "–"

    def share(point: Document) -> str:
        text = f"{100 * point['attention_memory'] / memory['limit']:.0f} %"
        return text if point["fits"] else f"{text} over"

    columns: list[tuple[str, int, Callable[[Document], str]]] = [
        ("r", 0, lambda point: f"{point['ratio']:g}"),
        ("bundle", 0, lambda point: str(point["topology"])),
        ("cards", 3, lambda point: str(point["cards"])),
        ("per card", 0, lambda point: _number(rate_per_unit(point, "card"))),
        ("eq. 21", 2, figure("throughput_per_instance")),
        ("steady", 0, figure("throughput_per_instance_steady")),
        ("± %", 3, half_width),
        ("theory", 4, figure("throughput_per_instance_theory")),
        ("barrier", 3, figure("throughput_per_instance_barrier")),
        ("gap %", 4, gap),
        (f"TPOT {unit}", 1, figure("tpot")),
        ("idle A", 2, lambda point: f"{100 * point['idle_attention']:.1f} %"),
        ("idle F", 2, lambda point: f"{100 * point['idle_ffn']:.1f} %"),
        ("memory", 1, share),
    ]
    left_out = {"cards", "per card"} if not counts_cards(configuration) else set()
    left_out |= set() if memory else {"memory"}
    columns = [column for column in columns if column[0] not in left_out]
    rows = [[cell(point) for _, _, cell in columns] for point in points]
    return Table([Column(title, rank) for title, rank, _ in columns], [*rows], fits=True)


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.4g} GB"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def sweep_charts(document: Document) -> list[Block]:
    """Throughput over r, and of a single configuration idle times and stage times."""
    charts = {"throughput": _throughput(document)}
    if len(document["configurations"]) == 1:
        charts |= {"idle": _idle(document), "regimes": _stages(document)}
    return [Figure(name, [chart], document["name"], size=(7.2, 4.4)) for name, chart in charts.items()]


def _is_logarithmic(ratios: Sequence[float]) -> bool:
    return max(ratios) / min(ratios) > 6


def _throughput(document: Document) -> Chart:
    """Throughput per card if instances of any configuration have several, else per instance, as in the paper."""
    configurations = document["configurations"]
    keys = varying([configuration["settings"] for configuration in configurations])
    unit = "card" if any(counts_cards(configuration) for configuration in configurations) else "instance"
    several, shows_theory = len(configurations) > 1, len(configurations) <= MANY
    colours = series_colours(len(configurations)) if several else [None]
    curves: list[Curve] = []
    marks: dict[str, float] = {}
    for index, configuration in enumerate(configurations):
        name = in_words(configuration["settings"], keys)
        points = _points_of(document, index)
        if shows_theory:
            curves += _theories(configuration, unit, name, colours[index])
        curves += _simulated(points, unit, name, colours[index], kind="points" if shows_theory else "both")
        if not name:
            star = configuration["theory"]["r_star" if unit == "instance" else "r_star_per_card"]
            marks[f"r* = {star:.2f} by eq. 19"] = star
    label = f"output tokens per {document['time_unit'][:-1]} and {unit}"
    theories = "; dashed: theory as published, solid: with barrier and pipeline" if several and shows_theory else ""
    return Chart(
        f"Throughput: {label}{theories}", curves, "attention instances per FFN instance, r", label, marks=marks,
        log_x=_is_logarithmic([point["ratio"] for point in document["points"]]), height=380,
    )  # fmt: skip


def _theories(configuration: Document, unit: str, name: str, colour: str | None) -> list[Curve]:
    ratios = configuration["curves"]["ratio"]
    published, barrier = (curve_per_unit(configuration, theory, unit) for theory in ("theory", "barrier"))
    return [
        Curve(name or "theory as published", ratios, published, colour or SERIES[1], "dashed"),
        Curve(name or "barrier-aware theory", ratios, barrier, colour or SERIES[2]),
    ]


def _simulated(points: Sequence[Document], unit: str, name: str, colour: str | None, *, kind: str) -> list[Curve]:
    """Steady throughput with its intervals, points that do not fit and, of a single configuration, that of eq. 21."""
    ends = [interval_per_unit(point, unit) for point in points]
    ratios, rates = [point["ratio"] for point in points], [rate_per_unit(point, unit) for point in points]
    low, high = [low for low, _ in ends], [high for _, high in ends]
    names = [_point_name(point) for point in points]
    steady = Curve(name or "simulated, 95 % interval", ratios, rates, colour or SERIES[0], kind, low, high, names)
    curves = [steady]
    if not name:
        eq_21 = [point[f"throughput_per_{unit}"] for point in points]
        curves.append(Curve("simulated, first 80 % (eq. 21)", ratios, eq_21, SOFT, "crosses"))
    unfit = [point for point in points if point["fits"] is False]
    if unfit:
        label = f"{name}: does not fit in memory" if name else "does not fit in memory"
        rates = [rate_per_unit(point, unit) for point in unfit]
        curves.append(Curve(label, [point["ratio"] for point in unfit], rates, GOAL, "points"))
    return curves


def _point_name(point: Document) -> str:
    return f"{point['topology']}{'' if point['fits'] is not False else ', does not fit in memory'}"


def _idle(document: Document) -> Chart:
    points = _points_of(document, 0)
    ratios = [point["ratio"] for point in points]
    names = [point["topology"] for point in points]
    curves = [
        Curve(label, ratios, [100 * point[f"idle_{stage}"] for point in points], None, "both", names=names)
        for label, stage in (("attention", "attention"), ("FFN", "ffn"))
    ]
    crossing = document["configurations"][0]["simulation"]["idle_crossing"]
    marks = {} if crossing is None else {f"crossing at r = {crossing:.1f}": crossing}
    title = "Who waits for whom (eq. 23)"
    return Chart(title, curves, "r", "idle time, %", log_x=_is_logarithmic(ratios), marks=marks)


def _stages(document: Document) -> Chart:
    configuration = document["configurations"][0]
    theory, stages = configuration["theory"], configuration["curves"]
    labels = {
        "attention": "attention at the mean load", "communication": "communication, round trip", "ffn": "FFN",
        "step": "step, with barrier and pipeline",
    }  # fmt: skip
    curves = [
        Curve(label, stages["ratio"], stages[f"t_{name}"], kind="dashed" if name == "step" else "solid")
        for name, label in labels.items()
    ]
    low, high = stages["ratio"][0], stages["ratio"][-1]
    places = {
        f"FFN-bound from r = {theory['r_critical']:.2f}": theory["r_critical"],
        f"r* = {theory['r_star']:.2f}": theory["r_star"],
    }
    marks = {label: place for label, place in places.items() if low <= place <= high}
    unit = document["time_unit"]
    title = f"What a decode step takes, {unit}"
    return Chart(title, curves, "r", unit, log_x=_is_logarithmic(stages["ratio"]), marks=marks)


def _explorer(document: Document) -> Points:
    points = document["points"]
    fields = setting_fields([document["configurations"][point["configuration"]]["settings"] for point in points])
    colour = fields[0].key if fields else "regime"
    for key, (label, meaning, better) in POINT_COLUMNS.items():
        values = [_plain(point[key]) for point in points]
        if any(value is not None for value in values):
            fields.append(Field(key, label, values, meaning, better, setting=key == "ratio"))
    keys = {field.key for field in fields}
    steady = "throughput_per_instance_steady"
    rate = next(key for key in ("throughput_per_card_steady", steady, "throughput_per_instance") if key in keys)
    views = [View("throughput", "ratio", rate, colour), View("throughput against TPOT", "tpot", rate, colour, True)]
    return Points(fields, views, [_point_name(point) for point in points])


def _plain(value: Any) -> float | str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value  # type: ignore[no-any-return]


def _gaps(points: Sequence[Document], document: Document) -> list[Block]:
    explained = [point for point in points if point["gaps"] is not None]
    if not explained:
        return []
    names = {name: name.replace("_", " ") for name in explained[0]["gaps"]}
    rows: list[Sequence[Any]] = [
        [Shown("", point["ratio"]), *(f"{100 * (point['gaps'][name] - 1):+.2f}" for name in names)]
        for point in explained
    ]
    intro = "From the published formula (eq. 6) to the simulated eq. 21, in per cent; they multiply to the whole gap."
    meanings = "\n".join(f"{label}: {document['gap_names'][name]}" for name, label in names.items())
    columns = [Column("r"), *map(Column, names.values())]
    return [
        Text("Why theory and simulation differ", "heading", detail=True), Text(intro, detail=True),
        Text(meanings, "list", detail=True), Table(columns, rows, detail=True),
    ]  # fmt: skip


def curve_per_unit(configuration: Document, name: str, unit: str) -> list[float]:
    """A theory's curve; those of the document are per instance."""
    curves, cards = configuration["curves"], configuration["cards"]
    if unit == "instance":
        return list(curves[name])
    pairs = zip(curves["ratio"], curves[name], strict=True)
    return [rate * (ratio + 1) / (ratio * cards["attention"] + cards["ffn"]) for ratio, rate in pairs]


def rate_per_unit(point: Document, unit: str) -> float:
    """Steady throughput, or that of eq. 21 if there is none."""
    steady = point[f"throughput_per_{unit}_steady"]
    return float(point[f"throughput_per_{unit}"] if steady is None else steady)


def interval_per_unit(point: Document, unit: str) -> tuple[float, float]:
    """The 95 % interval of the steady throughput; without a steady state, the rate itself twice."""
    rate, steady = rate_per_unit(point, unit), point["throughput_per_instance_steady"]
    if steady is None:
        return rate, rate
    low, high = (float(end) * rate / float(steady) for end in point["throughput_ci"])
    return low, high
