"""Figures of SPEAR's claims about quality: recovery by variant and by quartile, CKA maps, and loss curves."""

from __future__ import annotations

from typing import Any

from reports.adaptation.figures import draw_damage
from reports.layout import Document, render
from reports.reproductions.spear.quality_table import NAMES

COLOURS = {"spear": "#2a8c5a", "all": "#1f5fa8", "random": "#d1762b"}
PLAIN = "#b9c9dc"


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    full = _compared_cells(document)
    return {
        "quality": render(_draw_variants, document, len(full), (4.6 * len(full) + 1, 3.6)),
        "quartiles": render(_draw_quartiles, document, len(full)),
        "cka_maps": render(_draw_maps, document, len(_map_names(document)), (2.3 * len(_map_names(document)) + 1, 3.2)),
        "losses": render(_draw_losses, document, 1 + len(full)),
    }


def _compared_cells(document: Document) -> list[Document]:
    """Summaries of the quantised models that are compensated in several ways."""
    return [cell for cell in document["summary"] if len(cell["variants"]) > 1]


def _draw_variants(panels: list[Any], document: Document) -> None:
    """The share of the gap that each variant closes, with its interval over seeds."""
    for axes, cell in zip(panels, _compared_cells(document), strict=True):
        for place, (name, row) in enumerate(cell["variants"].items()):
            axes.barh(place, 100 * row["recovered"], color=COLOURS.get(name, PLAIN), height=0.65)
            if row["interval"]:
                axes.plot([100 * end for end in row["interval"]], [place, place], color="black", lw=1.2)
        axes.set_yticks(range(len(cell["variants"])), [NAMES.get(name, name) for name in cell["variants"]])
        axes.invert_yaxis()
        axes.set_xlabel("share of the perplexity gap, %")
        axes.set_title(cell["cell"], loc="left", fontsize=10)


def _draw_quartiles(panels: list[Any], document: Document) -> None:
    """Divergence recovered in each quarter of the tokens, a line for each seed (figure 10)."""
    for axes, cell in zip(panels, _compared_cells(document), strict=True):
        for row in (row for row in document["cells"] if row["cell"] == cell["cell"]):
            quartiles = row["variants"]["spear"]["quartiles"]
            places = range(1, len(quartiles) + 1)
            axes.plot(places, [each["kl"] for each in quartiles], "o-", color=COLOURS["spear"], lw=1, ms=4)
            axes.plot(places, [each["kl_quantised"] for each in quartiles], "--", color="#777777", lw=0.9)
        axes.set_xticks(range(1, 5))
        axes.set_xlabel("quarter of the tokens, by quantisation error")
        axes.set_title(f"{cell['cell']}: KL (dashed), and recovered", loc="left", fontsize=10)
    panels[0].set_ylabel("nats a token")


def _map_names(document: Document) -> list[str]:
    return list(dict.fromkeys(row["cell"] for row in document["cells"]))


def _draw_maps(panels: list[Any], document: Document) -> None:
    """CKA damage by layer and module of the first seed; selected modules are marked (figures 12 and 13)."""
    for axes, name in zip(panels, _map_names(document), strict=True):
        row = next(row for row in document["cells"] if row["cell"] == name)
        draw_damage(axes, row["damage"], row["modules"])
        axes.set_title(name, loc="left", fontsize=9)
    panels[0].set_ylabel("layer")


def _draw_losses(panels: list[Any], document: Document) -> None:
    """Losses of the language models, then of SPEAR's calibrations, a line for each seed."""
    for base in document["bases"]:
        panels[0].plot(_shares(base["losses"]), base["losses"], color="#777777", lw=1)
    panels[0].set_title("language models, nats a token", loc="left", fontsize=10)
    for axes, cell in zip(panels[1:], _compared_cells(document), strict=True):
        for row in (row for row in document["cells"] if row["cell"] == cell["cell"]):
            losses = row["variants"]["spear"]["losses"]
            axes.plot(_shares(losses), losses, color=COLOURS["spear"], lw=1)
        axes.set_yscale("log")
        axes.set_title(f"{cell['cell']}: KL at temperature 2, nats", loc="left", fontsize=10)
    for axes in panels:
        axes.set_xlabel("share of the steps")


def _shares(losses: list[float]) -> list[float]:
    return [(index + 0.5) / len(losses) for index in range(len(losses))]
