"""Figures of the reproduced SPEAR paper: published beside computed."""

from __future__ import annotations

from typing import Any

from reports.layout import (
    Document,
    render,
)

STATIC, SLO = "#d1762b", "#1f5fa8"
COLOURS = {"w4": "black", "sparse": "#2a8c5a", "mid": "#1f5fa8", "dense": "#d1762b"}


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    return {
        "tradeoff": render(_draw_tradeoff, document, len(_densities(document))),
        "iteration": render(_draw_iteration, document),
    }


def _densities(document: Document) -> list[str]:
    return list(dict.fromkeys(row["density"] for row in document["rows"]))


def _draw_tradeoff(panels: list[Any], document: Document) -> None:
    """Mean TTFT against P99 ITL, a panel a density; bars reach over 95 % of single runs, dots stand at the goals."""
    for axes, density in zip(panels, _densities(document), strict=True):
        here = [row for row in document["rows"] if row["density"] == density]
        for fitted, colour, name in ((True, STATIC, "static"), (False, SLO, "SLO")):
            _draw_rows(axes, [row for row in here if row["fitted"] == fitted], colour, name)
        for goal in sorted({row["goal"] for row in here if row["goal"]}):
            axes.axvline(1e3 * goal, color="black", ls=":", lw=1)
        axes.set_yscale("log")
        axes.set_xlabel("P99 ITL, ms")
        axes.set_title(density, loc="left", fontsize=10)
    panels[0].set_title(f"SPEAR, Table 3: {_densities(document)[0]}", loc="left", fontsize=10)
    panels[0].set_ylabel("mean TTFT, ms")
    panels[0].legend(fontsize=7, frameon=False)


def _draw_rows(axes: Any, rows: list[Document], colour: str, name: str) -> None:
    for kind, face in (("published", "white"), ("predicted", colour)):
        across, up = ([1e3 * row[column][kind] for row in rows] for column in ("p99_itl", "ttft"))
        # Held-out rows are where a difference between the two has something to say: lines join the fitted ones only.
        mark = "o" if name == "static" else "s"
        line = f"{mark}-" if name == "static" and kind == "predicted" else mark
        label = f"{name}, {'printed' if kind == 'published' else 'predicted'}"
        axes.plot(across, up, line, color=colour, mfc=face, ms=5, lw=1, label=label)
    for row in rows:
        at = 1e3 * row["p99_itl"]["predicted"]
        axes.plot([at, at], [1e3 * bound for bound in row["ttft"]["prediction"]], color=colour, lw=1, alpha=0.6)
        label, above = (str(row["chunk"]), 3) if row["chunk"] else (f"{1e3 * row['goal']:g} ms", -9)
        place = (at, 1e3 * row["ttft"]["predicted"])
        axes.annotate(label, place, (5, above), textcoords="offset points", fontsize=7)


def _draw_iteration(panels: list[Any], document: Document) -> None:
    """T_S over the tokens of a pass, without compensators and at every density."""
    (axes,) = panels
    found = document["iteration"]
    for name, colour in COLOURS.items():
        label = "without compensators" if name == "w4" else name
        axes.plot(found["tokens"], [1e3 * each for each in found[name]], "o-", color=colour, ms=4, lw=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a pass")
    axes.set_ylabel("iteration latency, ms")
    axes.set_title("SPEAR: implied by the static rows of Table 3", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
