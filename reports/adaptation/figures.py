"""The loss curve of one training."""

from __future__ import annotations

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
