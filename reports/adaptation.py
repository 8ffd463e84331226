"""Trained small models (`twin adapt`): curves of losses, maps of damage, and tables of quality and speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.blocks import Chart, Curve, Document, Figure, Report, Text, rows_table, texts
from reports.svg import drawing, render, svg_text


def loss_figure(document: Document) -> str:
    """The losses of a `twin.adaptation/1` document over its steps, as an SVG text."""
    losses = document["losses"]
    curve = Curve("", range(1, len(losses) + 1), losses, "#1f5fa8")
    chart = Chart(document["name"], [curve], "step", "loss, nats a token", log_y=True)
    return svg_text(drawing(Figure("loss", [chart], size=(5.2, 3.8))))


def damage_figure(document: Document) -> str:
    """The CKA damage of a `twin.compensation/1` document by layer and module type, as an SVG text."""

    def draw(panels: list[Any], document: Document) -> None:
        draw_damage(panels[0], document["damage"], document["modules"])
        panels[0].set_title(f"{document['method']}, {document['precision']['bits']} bits", loc="left", fontsize=10)
        panels[0].set_ylabel("layer")

    return render(draw, document)


def draw_damage(axes: Any, damage: dict[str, float], modules: Sequence[str]) -> None:
    """Draw the damage as a map on axes; modules with compensators are marked."""
    types = list(dict.fromkeys(name.rpartition(".")[2] for name in damage))
    layers = len(damage) // len(types)
    values = [[damage[f"layers.{layer}.{kind}"] for kind in types] for layer in range(layers)]
    axes.imshow(values, cmap="YlOrRd", aspect="auto", vmin=0)
    for name in modules:
        _, layer, kind = name.split(".")
        axes.plot(types.index(kind), int(layer), "o", color="black", mfc="none", ms=9)
    axes.set_xticks(range(len(types)), types, fontsize=7)
    axes.set_yticks(range(layers))


SIDES = ("measured", "predicted")


def measured_report(document: Document) -> Report:
    """A row for each model of a `twin.quality-and-latency/1` document."""
    title = f"At {100 * document['load']:.0f} % of each engine's capacity, up to {document['concurrency']} sequences"
    metrics = (("tpot.mean", "1e3 .2f"), ("ttft.mean", "1e3 .2f"), ("output_throughput", ".0f"))
    rows = rows_table(
        "model | perplexity | right, % | KL, nats | MiB"
        " | ms/token | predicted | ms to first | predicted | tokens/s | predicted",
        "{model} | {perplexity:.3f} | {accuracy:100 .1f} | {kl:.4f} | {mib:.2f}"
        + "".join(f" | {{metrics[{name}][{side}]:{spec}}}" for name, spec in metrics for side in SIDES),
        [row | {"mib": row["bytes"] / 2**20} for row in document["models"]],
    )
    return Report("", [Text(title), rows])


def served_report(document: Document) -> Report:
    """The answers of each task that modules gave while they were served together, and what that took."""
    rows = rows_table(
        "task | served | offline | same answers",
        "{task} | {exact_match_served:100 .1f} % | {exact_match_offline:100 .1f} % | {equal_answers:100 .1f} %",
        [{"task": task, **row} for task, row in document["tasks"].items()],
    )
    steps = document["decode_steps_by_models"]
    total = sum(steps)
    mean = sum(models * count for models, count in enumerate(steps, 1)) / total if total else 0.0
    largest = max((models for models, count in enumerate(steps, 1) if count), default=0)
    bits = "" if document["bits"] is None else f" in {document['bits']} bits"
    decoders = len(document["tasks"]) if document["decode"] == "isolated" else 1
    lines = [
        f"measured: {document['tokens_per_second']:.0f} tokens/s, {1e3 * document['ttft_mean']:.1f} ms to the first "
        f"token, {1e3 * document['tpot_mean']:.2f} ms per further token",
        f"{document['decode']} decoding: {decoders} decode module{'s' * (decoders > 1)}{bits}, "
        f"{document['decoder_bytes'] / 2**20:.2f} MiB",
        f"tasks in a decode step: {mean:.1f} on average, {largest} at most",
    ]
    return Report("", [rows, *texts(lines)])
