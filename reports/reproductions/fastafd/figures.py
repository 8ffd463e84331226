"""Figures of measured AFD bundles: measured beside predicted."""

from __future__ import annotations

from typing import Any

from reports.layout import Document, render

COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8c4a9e", "#a8321f", "#5f6f7f")


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    drawn = {"steps": render(_draw_steps, document, 2)}
    if document["comparison"]:
        drawn["layouts"] = render(_draw_layouts, document, 1)
    return drawn


def _draw_steps(panels: list[Any], document: Document) -> None:
    """TPOT and throughput a GPU over the ratio: measured points, filled where fitted, and the predicted lines."""
    keys = [("tpot_measured_ms", "tpot_predicted_ms"), ("throughput_measured", "throughput_predicted")]
    for axes, (measured, predicted) in zip(panels, keys, strict=True):
        for index, curve in enumerate(document["curves"]):
            colour = COLOURS[index % len(COLOURS)]
            own = [p for p in document["points"] if _curve(p) == _curve(curve)]
            label = f"{curve['prompt_tokens']:,} tokens, batch {curve['batch_size']}"
            axes.plot([p["ratio"] for p in own], [p[predicted] for p in own], "-", color=colour, lw=1.2, label=label)
            for fitted, face in ((True, colour), (False, "white")):
                shown = [p for p in own if p["fitted"] == fitted]
                axes.plot([p["ratio"] for p in shown], [p[measured] for p in shown], "o", color=colour, mfc=face, ms=4)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("attention trays for each FFN tray, r")
    panels[0].set_ylabel("TPOT, ms")
    panels[1].set_ylabel("output tokens/s a GPU")
    panels[0].set_title("FastAFD on GB200: measured (filled: fitted), lines predicted", loc="left", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")


def _draw_layouts(panels: list[Any], document: Document) -> None:
    """Predicted gain of AFD over wide EP by the number of GPUs, a line for each prompt length."""
    axes = panels[0]
    for index, length in enumerate(document["comparison"]):
        axes.plot(
            [row["gpus"] for row in length["rows"]], [100 * row["gain"] for row in length["rows"]],
            "o-", color=COLOURS[index % len(COLOURS)], alpha=0.55 if index >= len(COLOURS) else 1, ms=3, lw=1.2,
            label=f"{length['prompt_tokens']:,}",
        )  # fmt: skip
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("AFD over wide EP, % tokens/s a GPU")
    axes.set_title("Predicted, by prompt tokens", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False)


def _curve(row: Document) -> tuple[int, int]:
    return row["prompt_tokens"], row["batch_size"]
