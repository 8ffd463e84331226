"""SPEAR's claims about quality, beside small language models that are trained here (`live/adaptation/compensation.py`).

The printed models have 1 to 70 billion parameters; ours have some hundred thousand to some million. Effects and
orderings are compared, not digits. The share of the perplexity gap that compensation closes is comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from papers.common import Claim, Wording, claims_table, conclusion, ends, interval, reaches, step_shares, title
from papers.spear.published import QualityRow, quality_rows
from reports.adaptation import draw_damage
from reports.blocks import Document, Report, Table, sections
from reports.svg import render

WORDING = Wording("spear", "quality")
BITS = (4, 3, 2)

TOP = 0.30
"""Share of the modules that are compared between quantisers (Table 9)."""


def summarise(size: Document, bases: Sequence[Document], cells: Sequence[Document]) -> Document:
    """The document `twin.reproduction-spear-quality/1`, of rows of models, and of quantised ones by seed and cell."""
    published = quality_rows()
    return {
        "schema": "twin.reproduction-spear-quality/1",
        "paper": "spear",
        "simulated": False,
        "size": size,
        "bases": list(bases),
        "cells": list(cells),
        "summary": [_cell(name, _of(cells, name), published) for name in _names(cells)],
        "shifts": shifts(cells),
        "claims": claims(cells, published),
        "notes": WORDING.notes(),
    }


def recovered_share(full: float, quantised: float, compensated: float) -> float:
    """The share of a gap in perplexity that is closed."""
    return (quantised - compensated) / (quantised - full)


def printed_recovery(
    published: Sequence[QualityRow], bits: int, variant: str = "spear", quantiser: str = "rtn", grain: str = "pc"
) -> dict[tuple[str, str, str], float]:
    """Printed shares of the gap by table, model and text, for a variant of one quantised model."""
    full = {(row.model, row.text): row.perplexity for row in published if row.variant == "full"}
    kind = [row for row in published if (row.bits, row.quantiser, row.grain) == (bits, quantiser, grain)]
    base = {(row.model, row.text): row.perplexity for row in kind if row.variant == "quantised"}
    return {
        (row.where, row.model, row.text): recovered_share(full[key], base[key], row.perplexity)
        for row in kind
        if row.variant == variant and (key := (row.model, row.text)) in full and key in base
    }


def claims(cells: Sequence[Document], published: Sequence[QualityRow]) -> list[Claim]:
    result: list[Claim] = []
    for bits in BITS:
        for claim in WORDING.texts["claims"]:
            printed = _printed_values(published, bits, claim["values"])
            result += _claim(claim, bits, printed, _values(_of(cells, f"rtn-{bits}-pc"), claim["values"]))
    for quantiser in ("gptq", "awq"):
        for bits in BITS:
            printed = list(printed_recovery(published, bits, quantiser=quantiser).values())
            values = _values(_of(cells, f"{quantiser}-{bits}-pc"), "recovered")
            result += _claim(WORDING.texts["others"], bits, printed, values, quantiser.upper())
    return result


def _claim(
    claim: Document, bits: int, printed: Sequence[float], values: Sequence[float], quantiser: str = "RTN"
) -> Iterator[Claim]:
    """A claim on values, one a seed; none without values."""
    if not values:
        return
    goal, where = (_at(claim.get(name, 0.0), bits) for name in ("goal", "where"))
    unit, strict, at_most = claim.get("unit", "points"), claim.get("strict", True), claim.get("at_most", False)
    show: Callable[[float], str] = (lambda value: f"{100 * value:+.1f}") if unit else (lambda value: f"{value:+.4f}")
    average, span = mean(values), interval(values)
    low_and_high = dict.fromkeys(map(show, ends(printed))) if printed else {}
    seeds = f"; {show(span[0])} to {show(span[1])} over seeds" if span else ""
    word = "at most" if at_most else "above" if strict else "at least"
    yield {
        "where": where,
        "what": claim["what"].format(bits=bits, quantiser=quantiser),
        "published": f"{' to '.join(low_and_high)} {unit}".strip() if printed else "nothing",
        "found": f"{show(average)} {unit}".strip(),
        "value": average,
        "interval": span,
        "agrees": reaches(values, goal, at_most=at_most, strict=strict),
        "note": f"goal {word} {show(goal)}{seeds}",
    }


def _at(value: Any, bits: int) -> Any:
    return value[bits] if isinstance(value, dict) else value


def _values(rows: Sequence[Document], name: str) -> list[float]:
    """A measure of each seed, or SPEAR's share of the gap less that of a variant, of each seed that has it."""
    if name in MEASURES:
        return [MEASURES[name](row) for row in rows]
    return [_recovered(row) - _recovered(row, name) for row in rows if name in row["variants"]]


def _recovered(row: Document, variant: str = "spear") -> float:
    return float(row["variants"][variant]["recovered"])


def _int8(row: Document) -> float:
    """The share recovered in INT8 less that recovered in float32."""
    exact = row["variants"]["spear"]["perplexity_float"]
    return _recovered(row) - recovered_share(row["full"]["perplexity"], row["quantised"]["perplexity"], exact)


def _hardest(row: Document) -> float:
    quartiles = row["variants"]["spear"]["quartiles"]
    return float(quartiles[-1]["gate_loss"] - quartiles[0]["gate_loss"])


MEASURES: dict[str, Callable[[Document], float]] = {
    "recovered": _recovered,
    "int8": _int8,
    "hardest": _hardest,
    "memory": lambda row: float(row["share_llama_2_7b"]),
}
"""Subjects of claims, besides a difference of variants."""


def _printed_values(published: Sequence[QualityRow], bits: int, name: str) -> list[float]:
    """Printed shares, or differences of SPEAR's share and a variant's, over tables, models and texts that have both."""
    shares = printed_recovery(published, bits)
    if name == "recovered":
        return list(shares.values())
    if name == "gate_off" and bits == 4:
        quantised, full = (
            {row.model: row.perplexity for row in published if row.where == "Table 2" and row.variant == variant}
            for variant in ("quantised", "full")
        )
        return [cost / (quantised[model] - full[model]) for model, cost in WORDING.texts["gate_off"].items()]
    variant_shares = printed_recovery(published, bits, name)
    return [shares[key] - variant_shares[key] for key in variant_shares if key in shares]


def shifts(cells: Sequence[Document]) -> list[Document]:
    rows = []
    for bits in BITS:
        awq = _of(cells, f"awq-{bits}-pc")
        for quantiser, printed in WORDING.texts["order"].items():
            pairs = list(zip(_of(cells, f"{quantiser}-{bits}-pc"), awq, strict=False))
            if pairs:
                rows.append(
                    {
                        "quantiser": quantiser,
                        "bits": bits,
                        "spearman": mean(_spearman(a["damage"], b["damage"]) for a, b in pairs),
                        "jaccard": mean(_overlap(a["damage"], b["damage"]) for a, b in pairs),
                        "printed": printed,
                    }
                )
    return rows


def _spearman(first: dict[str, float], second: dict[str, float]) -> float:
    """The rank correlation of two damages of the same modules, without ties."""
    names = list(first)
    ranks = [
        {name: rank for rank, name in enumerate(sorted(names, key=damage.__getitem__))} for damage in (first, second)
    ]
    squares = sum((ranks[0][name] - ranks[1][name]) ** 2 for name in names)
    return 1 - 6 * squares / (len(names) * (len(names) ** 2 - 1))


def _overlap(damage: dict[str, float], reference: dict[str, float]) -> float:
    """Jaccard overlap of the modules with the most damage."""
    count = max(round(TOP * len(damage)), 1)
    first, second = (set(sorted(modules, key=modules.__getitem__)[-count:]) for modules in (damage, reference))
    return len(first & second) / len(first | second)


def _of(cells: Sequence[Document], name: str) -> list[Document]:
    return [row for row in cells if row["cell"] == name]


def _names(cells: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(row["cell"] for row in cells))


def _means(rows: Sequence[Document], *keys: str) -> Document:
    return {key: mean(row[key] for row in rows) for key in keys}


def _cell(name: str, rows: Sequence[Document], published: Sequence[QualityRow]) -> Document:
    quantiser, bits, grain = name.split("-")
    variants = {}
    for variant in dict.fromkeys(variant for row in rows for variant in row["variants"]):
        results = [row["variants"][variant] for row in rows if variant in row["variants"]]
        printed = printed_recovery(published, int(bits), variant, quantiser, grain).values()
        variants[variant] = {
            **_means(results, "perplexity", "kl", "recovered"),
            "interval": interval([row["recovered"] for row in results]),
            **_means(results, "modules", "rank", "bytes"),
            "printed": ends(printed) if printed else None,
            "seeds": len(results),
        }
    return {
        "cell": name,
        "full": mean(row["full"]["perplexity"] for row in rows),
        "quantised": mean(row["quantised"]["perplexity"] for row in rows),
        "kl": mean(row["quantised"]["kl"] for row in rows),
        **_means(rows, "entropy", "share", "share_llama_2_7b"),
        "variants": variants,
    }


# -- the report --------------------------------------------------------------------------------------------------------


NAMES: dict[str, str] = WORDING.texts["names"]
"""Variants as tables and figures name them."""


def tables(document: Document) -> Report:
    """Every quantised model with its variants, quartiles, the claims with what is found, what disagrees, and notes."""
    bases = document["bases"]
    perplexities = ", ".join(f"{base['perplexity']:.2f}" for base in bases)
    values = {"parameters": bases[0]["parameters"], "corpus": bases[0]["corpus"], **document["size"]["text"]}
    goals = {"goal": lambda claim: str(claim["note"]).removeprefix("goal ")}
    return sections(
        [
            (WORDING.title("cells", seeds=len(bases), perplexities=perplexities, **values), _cells(document)),
            WORDING.section("quartiles", _quartiles(document)),
            WORDING.section("shifts", document["shifts"]),
            ("Claims", claims_table(document["claims"], goals)),
            *conclusion(document),
        ]
    )


def _cells(document: Document) -> Table:
    result = WORDING.table("cells", [])
    for cell in document["summary"]:
        result.add_row("16 bits", f"{cell['full']:.3f}")
        result.add_row(cell["cell"], f"{cell['quantised']:.3f}", f"{cell['kl']:.4f}")
        shares = {key: f"{100 * cell[key]:.2f} %" for key in ("share", "share_llama_2_7b")}
        rows = [
            {"name": NAMES.get(name, name), **row, **(shares if name == "spear" else dict.fromkeys(shares))}
            for name, row in cell["variants"].items()
        ]
        result.rows += WORDING.table("cells", rows).rows
    return result


def _quartiles(document: Document) -> Iterator[Document]:
    for name in _names(document["cells"]):
        seeds = [row["variants"]["spear"]["quartiles"] for row in _of(document["cells"], name)]
        for index, rows in enumerate(zip(*seeds, strict=True)):
            means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
            yield {"cell": None if index else name, "quarter": index + 1, **means}


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = {"spear": "#2a8c5a", "all": "#1f5fa8", "random": "#d1762b"}
PLAIN = "#b9c9dc"


def figures(document: Document) -> dict[str, str]:
    panels = len(_compared(document))
    quality = {"quality": render(_draw_variants, document, panels, (4.6 * panels + 1, 3.6))}
    if "cells" not in document:
        return quality
    maps = len(_names(document["cells"]))
    return quality | {
        "quartiles": render(_draw_quartiles, document, panels),
        "cka_maps": render(_draw_maps, document, maps, (2.3 * maps + 1, 3.2)),
        "losses": render(_draw_losses, document, 1 + panels),
    }


def _compared(document: Document) -> list[Document]:
    """The cells in which variants are compared."""
    return [cell for cell in document["summary"] if len(cell["variants"]) > 1]


def _draw_variants(panels: list[Any], document: Document) -> None:
    for axes, cell in zip(panels, _compared(document), strict=True):
        for place, (name, row) in enumerate(cell["variants"].items()):
            axes.barh(place, 100 * row["recovered"], color=COLOURS.get(name, PLAIN), height=0.65)
            if row["interval"]:
                axes.plot([100 * end for end in row["interval"]], [place, place], color="black", lw=1.2)
        axes.set_yticks(range(len(cell["variants"])), [NAMES.get(name, name) for name in cell["variants"]])
        axes.invert_yaxis()
        title(axes, cell["cell"], xlabel="share of the perplexity gap, %")


def _draw_quartiles(panels: list[Any], document: Document) -> None:
    """Divergence recovered in each quarter of the tokens, a line for each seed (figure 10)."""
    for axes, cell in zip(panels, _compared(document), strict=True):
        for row in _of(document["cells"], cell["cell"]):
            quartiles = row["variants"]["spear"]["quartiles"]
            places = range(1, len(quartiles) + 1)
            axes.plot(places, [quartile["kl"] for quartile in quartiles], "o-", color=COLOURS["spear"], lw=1, ms=4)
            axes.plot(places, [quartile["kl_quantised"] for quartile in quartiles], "--", color="#777777", lw=0.9)
        axes.set_xticks(range(1, 5))
        name = f"{cell['cell']}: KL (dashed), and recovered"
        title(axes, name, xlabel="quarter of the tokens, by quantisation error")
    panels[0].set_ylabel("nats a token")


def _draw_maps(panels: list[Any], document: Document) -> None:
    """CKA damage by layer and module of the first seed; selected modules are marked (figures 12 and 13)."""
    for axes, name in zip(panels, _names(document["cells"]), strict=True):
        row = _of(document["cells"], name)[0]
        draw_damage(axes, row["damage"], row["modules"])
        title(axes, name, fontsize=9)
    panels[0].set_ylabel("layer")


def _draw_losses(panels: list[Any], document: Document) -> None:
    """Losses of the language models, then of SPEAR's calibrations, a line for each seed."""
    for base in document["bases"]:
        panels[0].plot(step_shares(base["losses"]), base["losses"], color="#777777", lw=1)
    title(panels[0], "language models, nats a token")
    for axes, cell in zip(panels[1:], _compared(document), strict=True):
        for row in _of(document["cells"], cell["cell"]):
            losses = row["variants"]["spear"]["losses"]
            axes.plot(step_shares(losses), losses, color=COLOURS["spear"], lw=1)
        title(axes, f"{cell['cell']}: KL at temperature 2, nats", yscale="log")
    for axes in panels:
        axes.set_xlabel("share of the steps")
