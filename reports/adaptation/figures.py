"""The loss curve of one training, and the map of the damage that quantisation does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.layout import Document, render


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
