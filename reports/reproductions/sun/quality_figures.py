"""Figures of SUN's claims about accuracy: exact match of the variants, and loss curves."""

from __future__ import annotations

from typing import Any

from reports.layout import Document, render
from reports.reproductions.sun.quality_table import NAMES

COLOURS = {"full": "#1f5fa8", "sun": "#2a8c5a", "qsun4": "#d1762b", "qsun3": "#8c2a6b", "base": "#777777"}


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    return {
        "quality": render(_draw_variants, document, 1, (8.5, 4.2)),
        "losses": render(_draw_losses, document, len(_task_names(document)), (13.0, 3.4)),
        "base_loss": render(_draw_base, document, 1),
    }


def _draw_variants(panels: list[Any], document: Document) -> None:
    """Exact match of each variant: the mean with its interval, and tasks as points."""
    axes, rows = panels[0], document["variants"]
    for place, row in enumerate(rows):
        axes.barh(place, 100 * row["exact_match"], color=COLOURS.get(row["variant"], "#b9c9dc"), height=0.65)
        if row["interval"]:
            low, high = (100 * min(max(end, 0.0), 1.0) for end in row["interval"])
            axes.plot([low, high], [place, place], color="black", lw=1.2)
        tasks = [100 * task["exact_match"] for task in row["by_task"].values()]
        axes.plot(tasks, [place] * len(tasks), "o", color="black", ms=3, mfc="white")
    axes.set_yticks(range(len(rows)), [NAMES.get(row["variant"], row["variant"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 101)
    axes.set_xlabel("exact match, %: mean over tasks and seeds, interval over seeds, tasks as points")


def _draw_losses(panels: list[Any], document: Document) -> None:
    """Loss curves of the trainings, a panel for each task, a line for each seed."""
    for axes, name in zip(panels, _task_names(document), strict=True):
        for row in (row for row in document["tasks"] if row["task"] == name):
            for variant in ("full", "sun", "qsun4", "qsun3"):
                losses = row["variants"][variant]["losses"]
                label = NAMES[variant] if row["seed"] == document["tasks"][0]["seed"] else None
                axes.plot(_shares(losses), losses, color=COLOURS[variant], lw=0.9, label=label)
        axes.set_yscale("log")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("share of the steps")
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend(fontsize=7, frameon=False)


def _draw_base(panels: list[Any], document: Document) -> None:
    """Loss curves of the base models."""
    axes = panels[0]
    for base in document["bases"]:
        axes.plot(_shares(base["losses"]), base["losses"], color=COLOURS["base"], lw=1)
    axes.set_yscale("log")
    axes.set_xlabel("share of the steps")
    axes.set_ylabel("loss, nats a token")
    axes.set_title("base models, one a seed", loc="left", fontsize=10)


def _shares(losses: list[float]) -> list[float]:
    return [(index + 0.5) / len(losses) for index in range(len(losses))]


def _task_names(document: Document) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in document["tasks"]))
