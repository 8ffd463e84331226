"""Trained small models (`twin adapt`): curves of losses, maps of damage, and tables of quality and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reports.blocks import Document
from reports.layout import render


def loss_figure(document: Document) -> str:
    """The losses of a `twin.adaptation/1` document over its steps, as an SVG text."""
    return render(_draw, document)


def _draw(panels: list[Any], document: Document) -> None:
    axes, losses = panels[0], document["losses"]
    axes.plot(range(1, len(losses) + 1), losses, color="#1f5fa8", lw=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(document["name"], loc="left", fontsize=10)


def damage_figure(document: Document) -> str:
    """The CKA damage of a `twin.compensation/1` document by layer and module type, as an SVG text."""
    return render(_draw_damage, document)


def _draw_damage(panels: list[Any], document: Document) -> None:
    draw_damage(panels[0], document["damage"], document["modules"])
    panels[0].set_title(f"{document['method']}, {document['precision']['bits']} bits", loc="left", fontsize=10)
    panels[0].set_ylabel("layer")


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


HEADINGS = (
    "perplexity",
    "right, %",
    "KL, nats",
    "MiB",
    "ms/token",
    "predicted",
    "ms to first",
    "predicted",
    "tokens/s",
    "predicted",
)


def measured_table(document: Mapping[str, Any]) -> str:
    """The table, from the command's document: a line for each model."""
    rows = [_cells(row) for row in document["models"]]
    name = max(len("model"), *(len(row["model"]) for row in document["models"]))
    widths = [max(len(text) for text in column) for column in zip(HEADINGS, *rows, strict=True)]
    lines = [f"At {100 * document['load']:.0f} % of each engine's capacity, up to {document['concurrency']} sequences"]
    for first, cells in zip(("model", *(row["model"] for row in document["models"])), (HEADINGS, *rows), strict=True):
        lines.append(
            "  ".join([f"{first:{name}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))])
        )
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    tpot, ttft, rate = (row["metrics"][name] for name in ("tpot.mean", "ttft.mean", "output_throughput"))
    return (
        f"{row['perplexity']:.3f}", f"{100 * row['accuracy']:.1f}", f"{row['kl']:.4f}", f"{row['bytes'] / 2**20:.2f}",
        f"{1e3 * tpot['measured']:.2f}", f"{1e3 * tpot['predicted']:.2f}",
        f"{1e3 * ttft['measured']:.2f}", f"{1e3 * ttft['predicted']:.2f}",
        f"{rate['measured']:.0f}", f"{rate['predicted']:.0f}",
    )  # fmt: skip


def served_table(document: Mapping[str, Any]) -> str:
    """The table, from the command's document."""
    width = max(len(task) for task in document["tasks"])
    lines = [f"{'task':{width}}  served  offline  same answers"]
    for task, row in document["tasks"].items():
        shares = (row["exact_match_served"], row["exact_match_offline"], row["equal_answers"])
        served, offline, same = (f"{100 * share:.1f} %" for share in shares)
        lines.append(f"{task:{width}} {served:>7} {offline:>8} {same:>13}")
    steps = document["decode_steps_by_models"]
    total = sum(steps)
    mean = sum(models * count for models, count in enumerate(steps, 1)) / total if total else 0.0
    largest = max((models for models, count in enumerate(steps, 1) if count), default=0)
    bits = "" if document["bits"] is None else f" in {document['bits']} bits"
    decoders = len(document["tasks"]) if document["decode"] == "isolated" else 1
    lines += [
        f"measured: {document['tokens_per_second']:.0f} tokens/s, {1e3 * document['ttft_mean']:.1f} ms to the first "
        f"token, {1e3 * document['tpot_mean']:.2f} ms per further token",
        f"{document['decode']} decoding: {decoders} decode module{'s' * (decoders > 1)}{bits}, "
        f"{document['decoder_bytes'] / 2**20:.2f} MiB",
        f"tasks in a decode step: {mean:.1f} on average, {largest} at most",
    ]
    return "\n".join(lines)
