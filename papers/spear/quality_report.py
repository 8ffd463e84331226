"""Tables and figures of SPEAR's claims about quality: small language models trained here beside the printed ones."""

from __future__ import annotations

from typing import Any

from papers.layout import claims_table, disagreements, percent_range, step_shares
from reports.adaptation import draw_damage
from reports.blocks import Document, Report, Table
from reports.layout import Section, bullets, render, rows_table, sections, table

NAMES = {
    "spear": "SPEAR",
    "random": "random modules",
    "uniform": "all modules, same memory",
    "all": "all modules, twice the memory",
    "gate_off": "gate off",
    "corpus": "calibrated on training text",
    "svd": "static, SVD (LQER)",
    "whitened": "static, whitened (QERA)",
}
"""Variants as tables and figures name them."""


def tables(document: Document) -> Report:
    """Every quantised model with its variants, quartiles, the claims with what is found, what disagrees, and notes."""
    text, bases = document["size"]["text"], document["bases"]
    perplexities = ", ".join(f"{base['perplexity']:.2f}" for base in bases)
    about = (
        f"Language models of {bases[0]['parameters']:,} parameters ({text['layers']} layers, width {text['hidden']},"
        f" {text['vocabulary']} tokens) on the {bases[0]['corpus']['description']}, {len(bases)} seeds; held-out"
        f" perplexity {perplexities}"
    )
    parts: list[Section] = [
        (f"{about}\nPerplexity and the share of the gap that is closed, %", _cells(document)),
        ("Recovery by quarter of the tokens, from the least quantisation error (figure 10)", _quartiles(document)),
        ("Order of the damage under AWQ and another quantiser (Table 9)", _shifts(document)),
        ("Claims", claims_table(document["claims"], {"goal": lambda claim: str(claim["note"]).removeprefix("goal ")})),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _cells(document: Document) -> Table:
    result = table(
        "model", "perplexity", "KL, nats", "closed", "over seeds", "printed", "modules", "rank", "bytes",
        "of the model", "at Llama-2-7B",
    )  # fmt: skip
    for cell in document["summary"]:
        result.add_row("16 bits", f"{cell['full']:.3f}")
        result.add_row(cell["cell"], f"{cell['quantised']:.3f}", f"{cell['kl']:.4f}")
        for name, row in cell["variants"].items():
            shares = [f"{100 * cell[key]:.2f} %" for key in ("share", "share_llama_2_7b")] if name == "spear" else []
            result.add_row(
                f"  + {NAMES.get(name, name)}", f"{row['perplexity']:.3f}", f"{row['kl']:.4f}",
                f"{100 * row['recovered']:.1f}", percent_range(row["interval"]), percent_range(row["printed"]),
                f"{row['modules']:.1f}", f"{row['rank']:.1f}", f"{row['bytes']:,.0f}", *shares,
            )  # fmt: skip
    return result


def _quartiles(document: Document) -> Table:
    result = table("model", "quarter", "1 − cosine", "KL", "KL recovered", "loss recovered", "of that, by the gate")
    for name in dict.fromkeys(cell["cell"] for cell in document["cells"]):
        rows = [cell["variants"]["spear"]["quartiles"] for cell in document["cells"] if cell["cell"] == name]
        for index in range(len(rows[0])):
            quartile = [
                sum(row[index][key] for row in rows) / len(rows)
                for key in ("deviation", "kl_quantised", "kl", "loss", "gate_loss")
            ]
            result.add_row(name if index == 0 else "", str(index + 1), *(f"{value:.4f}" for value in quartile))
    return result


def _shifts(document: Document) -> Table:
    return rows_table(
        "quantiser | bits | rank correlation | printed | overlap of the top 30 %",
        "{quantiser} | {bits} | {spearman:.2f} | {printed[0]} to {printed[1]} | {jaccard:.2f}",
        document["shifts"],
    )


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = {"spear": "#2a8c5a", "all": "#1f5fa8", "random": "#d1762b"}
PLAIN = "#b9c9dc"


def figures(document: Document) -> dict[str, str]:
    full = _compared_cells(document)
    quality = {"quality": render(_draw_variants, document, len(full), (4.6 * len(full) + 1, 3.6))}
    if "cells" not in document:
        return quality
    return quality | {
        "quartiles": render(_draw_quartiles, document, len(full)),
        "cka_maps": render(_draw_maps, document, len(_map_names(document)), (2.3 * len(_map_names(document)) + 1, 3.2)),
        "losses": render(_draw_losses, document, 1 + len(full)),
    }


def _compared_cells(document: Document) -> list[Document]:
    return [cell for cell in document["summary"] if len(cell["variants"]) > 1]


def _draw_variants(panels: list[Any], document: Document) -> None:
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
            axes.plot(places, [quartile["kl"] for quartile in quartiles], "o-", color=COLOURS["spear"], lw=1, ms=4)
            axes.plot(places, [quartile["kl_quantised"] for quartile in quartiles], "--", color="#777777", lw=0.9)
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
        panels[0].plot(step_shares(base["losses"]), base["losses"], color="#777777", lw=1)
    panels[0].set_title("language models, nats a token", loc="left", fontsize=10)
    for axes, cell in zip(panels[1:], _compared_cells(document), strict=True):
        for row in (row for row in document["cells"] if row["cell"] == cell["cell"]):
            losses = row["variants"]["spear"]["losses"]
            axes.plot(step_shares(losses), losses, color=COLOURS["spear"], lw=1)
        axes.set_yscale("log")
        axes.set_title(f"{cell['cell']}: KL at temperature 2, nats", loc="left", fontsize=10)
    for axes in panels:
        axes.set_xlabel("share of the steps")
