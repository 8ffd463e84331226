"""SPEAR's claims about quality, beside small language models that are trained here (`live/adaptation/compensation.py`).

The printed models have 1 to 70 billion parameters; ours have some hundred thousand to some million. Effects and
orderings are compared, not digits. The share of the perplexity gap that compensation closes is comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from papers.common import CONFIDENCE, claims_table, disagreements, interval, percent_range, step_shares
from papers.spear.published import GATE_OFF, QualityRow, quality_rows
from reports.adaptation import draw_damage
from reports.blocks import Document, Report, Section, Table, bullets, rows_table, sections, table
from reports.svg import render

SCHEMA = "twin.reproduction-spear-quality/1"

BITS = (4, 3, 2)

RECOVERED = {4: 0.70, 3: 0.70, 2: 0.75}
"""Goals for the share of the gap that SPEAR recovers, by bits, set before anything was computed."""

BELOW_ALL, INT8_COST, CORPUS = 0.04, 0.01, 0.04
"""Goals, in shares of the gap: how far SPEAR may be below compensators on all modules, what INT8 may cost, and how far
self-sampled text may be below the training text."""

TOP = 0.30
"""Share of the modules that are compared between quantisers (Table 9)."""

PRINTED_SHIFT = {"rtn": (0.94, 0.98), "gptq": (0.77, 0.89)}
"""Rank correlation of the damage under AWQ with that under another quantiser, over models (Table 9)."""


def summarise(size: Document, bases: Sequence[Document], cells: Sequence[Document]) -> Document:
    """The document `twin.reproduction-spear-quality/1`, of rows of models, and of quantised ones by seed and cell."""
    published = quality_rows()
    names = list(dict.fromkeys(row["cell"] for row in cells))
    return {
        "schema": SCHEMA,
        "paper": "spear",
        "simulated": False,
        "size": size,
        "bases": list(bases),
        "cells": list(cells),
        "summary": [_cell(name, _of(cells, name), published) for name in names],
        "shifts": shifts(cells),
        "claims": claims(cells, published),
        "notes": notes(),
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


def claims(cells: Sequence[Document], published: Sequence[QualityRow]) -> list[Document]:
    result: list[Document | None] = []
    for bits in BITS:
        rows = _of(cells, f"rtn-{bits}-pc")
        if rows:
            result += _placement_claims(rows, bits, published) + _compensator_claims(rows, bits, published)
    for quantiser in ("gptq", "awq"):
        for bits in BITS:
            rows = _of(cells, f"{quantiser}-{bits}-pc")
            if rows:
                published_shares = list(printed_recovery(published, bits, quantiser=quantiser).values())
                statement = f"SPEAR recovers a part of the gap, {quantiser.upper()} at {bits} bits"
                result.append(
                    _claim("Table 1" if bits == 4 else "Table 10", statement, published_shares, _values(rows), 0.0)
                )
    return [claim for claim in result if claim is not None]


def _placement_claims(rows: Sequence[Document], bits: int, published: Sequence[QualityRow]) -> list[Document | None]:
    where = {4: "Table 1", 3: "Table 10", 2: "Table 12"}[bits]
    at = f"at {bits} bits"
    spear = list(printed_recovery(published, bits).values())
    return [
        _claim(where, f"SPEAR's share of the gap {at}", spear, _values(rows), RECOVERED[bits], strict=False),
        _claim("Table 4", f"placement by CKA above random placement {at}",
               _printed_difference(published, bits, "random"), _differences(rows, "random"), 0.0),
        _claim("Table 4", f"placement by CKA against all modules at twice the memory {at}",
               _printed_difference(published, bits, "all"), _differences(rows, "all"), -BELOW_ALL, strict=False),
        _claim("Table 18", f"placement by CKA above the same memory on all modules {at}",
               _printed_difference(published, bits, "uniform"), _differences(rows, "uniform"), 0.0),
    ]  # fmt: skip


def _compensator_claims(rows: Sequence[Document], bits: int, published: Sequence[QualityRow]) -> list[Document | None]:
    at = f"at {bits} bits"
    gate = []
    if bits == 4:
        gaps = {row.model: row.perplexity for row in published if row.where == "Table 2" and row.variant == "quantised"}
        full = {row.model: row.perplexity for row in published if row.where == "Table 2" and row.variant == "full"}
        gate = [cost / (gaps[model] - full[model]) for model, cost in GATE_OFF.items()]
    tables = {"svd": "LQER's SVD", "whitened": "QERA's whitened SVD"}
    return [
        *(
            _claim("Table 2" if bits == 4 else "Table 11", f"SPEAR above {name}, static, at the same memory {at}",
                   _printed_difference(published, bits, variant), _differences(rows, variant), 0.0)
            for variant, name in tables.items()
        ),
        _claim("5.4.2", f"the gate's gain at the same memory {at}", gate, _differences(rows, "gate_off"), 0.0),
        _claim("Table 17", f"self-sampled text against the training text {at}",
               _printed_difference(published, bits, "corpus"), _differences(rows, "corpus"), -CORPUS, strict=False),
        _claim("Table 7", f"INT8 against compensators in float32 {at}", [], [_int8(row) for row in rows], -INT8_COST,
               strict=False),
        _claim("Figure 10", f"the gate's gain on the hardest quarter of tokens less that on the easiest {at}, nats",
               [], [_hardest(row) for row in rows], 0.0, unit=""),
        _claim("Table 1", f"memory for the same choice at Llama-2-7B's shapes {at}, of the quantised layers", [],
               [-row["share_llama_2_7b"] for row in rows], -0.01, strict=False, negated=True),
    ]  # fmt: skip


def notes() -> list[str]:
    return [
        "Shares are of the perplexity gap between the quantised and the 16-bit model (32 bits here); differences of"
        f" shares are in points. Intervals are {100 * CONFIDENCE:.0f} % over seeds (Student's t); each seed has a"
        " language model of its own. Strict claims need the whole interval on their side.",
        "Everything but `all` has the same bytes of compensators: half of those on all modules at full rank. Static"
        " terms are stored in INT8, too, where the paper's are in 16 bits.",
        "Modules are the engine's joined layers: qkv, o, gate_up, down. The deployment cost is that of the CPU kernels"
        " measured by twin calibrate run.",
        "A and B begin as the whitened SVD of the module's error; learning rates and steps are larger and fewer than"
        " Table 7's, which are for models a thousand times as large.",
    ]


def shifts(cells: Sequence[Document]) -> list[Document]:
    rows = []
    for bits in BITS:
        awq = _of(cells, f"awq-{bits}-pc")
        for quantiser, published_shift in PRINTED_SHIFT.items():
            pairs = list(zip(_of(cells, f"{quantiser}-{bits}-pc"), awq, strict=False))
            if pairs:
                rows.append(
                    {
                        "quantiser": quantiser,
                        "bits": bits,
                        "spearman": mean(_spearman(a["damage"], b["damage"]) for a, b in pairs),
                        "jaccard": mean(_overlap(a["damage"], b["damage"]) for a, b in pairs),
                        "printed": published_shift,
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


def _values(rows: Sequence[Document]) -> list[float]:
    return [row["variants"]["spear"]["recovered"] for row in rows]


def _differences(rows: Sequence[Document], against: str) -> list[float]:
    """SPEAR's share of the gap less another variant's, of each seed that has it."""
    return [
        row["variants"]["spear"]["recovered"] - row["variants"][against]["recovered"]
        for row in rows
        if against in row["variants"]
    ]


def _int8(row: Document) -> float:
    """The share recovered in INT8 less that recovered in float32."""
    spear = row["variants"]["spear"]
    exact = recovered_share(row["full"]["perplexity"], row["quantised"]["perplexity"], spear["perplexity_float"])
    return float(spear["recovered"] - exact)


def _hardest(row: Document) -> float:
    quartiles = row["variants"]["spear"]["quartiles"]
    return float(quartiles[-1]["gate_loss"] - quartiles[0]["gate_loss"])


def _printed_difference(published: Sequence[QualityRow], bits: int, variant: str) -> list[float]:
    """Printed differences of SPEAR's share and another variant's, over tables, models and texts that have both."""
    shares, variant_shares = (printed_recovery(published, bits, name) for name in ("spear", variant))
    return [shares[key] - variant_shares[key] for key in variant_shares if key in shares]


def _claim(
    where: str,
    statement: str,
    published_shares: Sequence[float],
    values: Sequence[float],
    minimum: float,
    *,
    strict: bool = True,
    unit: str = "points",
    negated: bool = False,
) -> Document | None:
    """A claim that values, one a seed, are at least `minimum` (`strict`: their interval is); None without values."""
    if not values:
        return None
    average, span = mean(values), interval(values)
    agrees = (span[0] if span else average) > minimum if strict else average >= minimum
    show: Callable[[float], str] = (lambda value: f"{100 * value:+.1f}") if unit else (lambda value: f"{value:+.4f}")
    if negated:  # an upper bound, written with its own sign
        average, span, minimum = -average, (-span[1], -span[0]) if span else None, -minimum
    seeds_range = f"; {show(span[0])} to {show(span[1])} over seeds" if span else ""
    word = "at most" if negated else "above" if strict else "at least"
    return {
        "where": where,
        "what": statement,
        "published": _range(published_shares, show, unit) if published_shares else "nothing",
        "found": f"{show(average)} {unit}".strip(),
        "value": average,
        "interval": span,
        "agrees": agrees,
        "note": f"goal {word} {show(minimum)}{seeds_range}",
    }


def _range(values: Sequence[float], show: Callable[[float], str], unit: str) -> str:
    low, high = show(min(values)), show(max(values))
    return f"{low if low == high else f'{low} to {high}'} {unit}".strip()


def _cell(name: str, rows: Sequence[Document], published: Sequence[QualityRow]) -> Document:
    quantiser, bits, grain = name.split("-")
    variants = {}
    names = dict.fromkeys(variant for row in rows for variant in row["variants"])
    for variant in names:
        results = [row["variants"][variant] for row in rows if variant in row["variants"]]
        shares = [row["recovered"] for row in results]
        published_shares = list(printed_recovery(published, int(bits), variant, quantiser, grain).values())
        variants[variant] = {
            "perplexity": mean(row["perplexity"] for row in results),
            "kl": mean(row["kl"] for row in results),
            "recovered": mean(shares),
            "interval": interval(shares),
            **{key: mean(row[key] for row in results) for key in ("modules", "rank", "bytes")},
            "printed": (min(published_shares), max(published_shares)) if published_shares else None,
            "seeds": len(results),
        }
    return {
        "cell": name,
        "full": mean(row["full"]["perplexity"] for row in rows),
        "quantised": mean(row["quantised"]["perplexity"] for row in rows),
        "kl": mean(row["quantised"]["kl"] for row in rows),
        **{key: mean(row[key] for row in rows) for key in ("entropy", "share", "share_llama_2_7b")},
        "variants": variants,
    }


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
