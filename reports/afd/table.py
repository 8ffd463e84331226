"""The table of a ratio sweep, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from reports.fitting_table import Column, FittingTable
from reports.settings import fixed, in_words, varying

Document = dict[str, Any]


def sweep_table(document: Document) -> RenderableType:
    """One table a configuration, each under a line that says what the theory and the simulation recommend."""
    settings = [configuration["settings"] for configuration in document["configurations"]]
    keys, shared = varying(settings), fixed(settings)
    parts: list[RenderableType] = [Text(f"All with {shared}.")] if shared else []
    for index, configuration in enumerate(document["configurations"]):
        points = [point for point in document["points"] if point["configuration"] == index]
        parts += [Text(headline(configuration, keys), style="bold")]
        parts += [Text(line, style="dim") for line in memory_lines(configuration)]
        parts.append(_points_table(points, document["time_unit"], configuration))
    parts.append(Text(footnote(document), style="dim"))
    return Group(*parts)


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
    """An explanation of the columns."""
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


def _points_table(points: list[Document], unit: str, configuration: Document) -> FittingTable:
    """One row a point. The number beside each title is its rank: high ranks are left out first on a narrow terminal."""
    per_card, memory = counts_cards(configuration), configuration["memory"]
    titles = {
        "r": 0,
        "bundle": 0,
        **({"cards": 3, "per card": 0} if per_card else {}),
        "eq. 21": 2,
        "steady": 0,
        "± %": 3,
        "theory": 4,
        "barrier": 3,
        "gap %": 4,
        f"TPOT {unit}": 1,
        "idle A": 2,
        "idle F": 2,
        **({"memory": 1} if memory else {}),
    }
    rows = [(*_cells(point, per_card=per_card), *((_memory(point, memory),) if memory else ())) for point in points]
    return FittingTable(
        [Column(title, [row[i] for row in rows], rank) for i, (title, rank) in enumerate(titles.items())]
    )


def _cells(point: Document, *, per_card: bool) -> list[str]:
    steady, barrier = point["throughput_per_instance_steady"], point["throughput_per_instance_barrier"]
    spread = gap = "–"
    if steady is not None:
        low, high = point["throughput_ci"]
        spread = f"{50 * (high - low) / steady:.2f}"
        if barrier is not None:
            gap = f"{100 * (barrier / steady - 1):+.2f}"
    rate_per_card = point["throughput_per_card" if steady is None else "throughput_per_card_steady"]
    return [
        f"{point['ratio']:g}",
        point["topology"],
        *((str(point["cards"]), _number(rate_per_card)) if per_card else ()),
        _number(point["throughput_per_instance"]),
        _number(steady),
        spread,
        _number(point["throughput_per_instance_theory"]),
        _number(barrier),
        gap,
        _number(point["tpot"]),
        f"{100 * point['idle_attention']:.1f} %",
        f"{100 * point['idle_ffn']:.1f} %",
    ]


def _memory(point: Document, memory: Document) -> str:
    """Share of the limit on an attention card, with a mark if the point does not fit."""
    share = f"{100 * point['attention_memory'] / memory['limit']:.0f} %"
    return share if point["fits"] else f"{share} over"


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.4g} GB"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
