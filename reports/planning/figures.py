"""Figures of a plan, drawn from its document alone."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from reports.layout import render

Document = dict[str, Any]

MEETS, MISSES, BEST = "#1f5fa8", "#b0b0b0", "#d1762b"


def plan_figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text; none where nothing was simulated."""
    return {"pareto": render(_pareto, document, size=(6.4, 4.2))} if document["rows"] else {}


def pareto(rows: list[Document]) -> list[Document]:
    """The rows that no other one beats in both tokens/s per GPU and tokens/s per user, by the latter."""
    known = [row for row in rows if None not in _place(row)]
    best = [row for row in known if not any(_beats(_place(other), _place(row)) for other in known)]
    return sorted(best, key=_place)


def _place(row: Document) -> tuple[Any, Any]:
    return row["tokens_per_second_per_user"], row["tokens_per_second_per_gpu"]


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] >= other[0] and one[1] >= other[1]


def _pareto(panels: list[Any], document: Document) -> None:
    (axes,) = panels
    rows = document["rows"]
    for layout, marker in (("colocated", "o"), ("disaggregated", "s"), ("afd", "^")):
        for meets in (True, False):
            shown = [
                row for row in rows if (row["layout"], row["meets"]) == (layout, meets) and None not in _place(row)
            ]
            if shown:
                label = f"{layout}, {'meets the goals' if meets else 'misses a goal'}"
                axes.plot(
                    *zip(*map(_place, shown), strict=True), marker, ms=6, color=MEETS if meets else MISSES, label=label
                )
    front = pareto([row for row in rows if row["meets"]])
    if front:
        axes.plot(*zip(*map(_place, front), strict=True), color=MEETS, lw=1, alpha=0.6)
    _label(axes, document)
    axes.set_xlabel("output tokens/s of a user (1 / mean TPOT)")
    axes.set_ylabel("output tokens/s of a GPU")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7.5, frameon=False, loc="lower right")
    axes.set_title(f"{document['name']}: deployments at the given rate", loc="left", fontsize=10)


def _label(axes: Axes, document: Document) -> None:
    """Mark the recommendation, and name every point by its devices."""
    best = document["recommendation"]
    for row in document["rows"]:
        if None in _place(row):
            continue
        is_best = best is not None and row["name"] == best["name"]
        if is_best:
            axes.plot(*_place(row), "o", ms=13, mfc="none", mec=BEST, mew=1.6, label="recommended")
        axes.annotate(row["devices"], _place(row), xytext=(5, 5), textcoords="offset points", fontsize=6.5)
