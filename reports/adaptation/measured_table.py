"""The table of `twin adapt measure`: quality, memory and time per token of each model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
