"""Tables of SPEAR's claims about quality: small language models trained here beside the printed ones."""

from __future__ import annotations

from reports.blocks import Report, Table
from reports.layout import Document, Section, bullets, disagreements, sections, table

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
    found = ", ".join(f"{base['perplexity']:.2f}" for base in bases)
    about = (
        f"Language models of {bases[0]['parameters']:,} parameters ({text['layers']} layers, width {text['hidden']},"
        f" {text['vocabulary']} tokens) on the {bases[0]['corpus']['description']}, {len(bases)} seeds; held-out"
        f" perplexity {found}"
    )
    parts: list[Section] = [
        (f"{about}\nPerplexity and the share of the gap that is closed, %", _cells(document)),
        ("Recovery by quarter of the tokens, from the least quantisation error (figure 10)", _quartiles(document)),
        ("Order of the damage under AWQ and another quantiser (Table 9)", _shifts(document)),
        ("Claims", _claims(document["claims"])),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _cells(document: Document) -> Table:
    shown = table(
        "model", "perplexity", "KL, nats", "closed", "over seeds", "printed", "modules", "rank", "bytes",
        "of the model", "at Llama-2-7B",
    )  # fmt: skip
    for cell in document["summary"]:
        shown.add_row("16 bits", f"{cell['full']:.3f}")
        shown.add_row(cell["cell"], f"{cell['quantised']:.3f}", f"{cell['kl']:.4f}")
        for name, row in cell["variants"].items():
            shares = [f"{100 * cell[key]:.2f} %" for key in ("share", "share_llama_2_7b")] if name == "spear" else []
            shown.add_row(
                f"  + {NAMES.get(name, name)}", f"{row['perplexity']:.3f}", f"{row['kl']:.4f}",
                f"{100 * row['recovered']:.1f}", _span(row["interval"]), _span(row["printed"]),
                f"{row['modules']:.1f}", f"{row['rank']:.1f}", f"{row['bytes']:,.0f}", *shares,
            )  # fmt: skip
    return shown


def _quartiles(document: Document) -> Table:
    shown = table("model", "quarter", "1 − cosine", "KL", "KL recovered", "loss recovered", "of that, by the gate")
    for name in dict.fromkeys(cell["cell"] for cell in document["cells"]):
        rows = [cell["variants"]["spear"]["quartiles"] for cell in document["cells"] if cell["cell"] == name]
        for index in range(len(rows[0])):
            each = [
                sum(row[index][key] for row in rows) / len(rows)
                for key in ("deviation", "kl_quantised", "kl", "loss", "gate_loss")
            ]
            shown.add_row(name if index == 0 else "", str(index + 1), *(f"{value:.4f}" for value in each))
    return shown


def _shifts(document: Document) -> Table:
    shown = table("quantiser", "bits", "rank correlation", "printed", "overlap of the top 30 %")
    for row in document["shifts"]:
        low, high = row["printed"]
        shown.add_row(
            row["quantiser"], str(row["bits"]), f"{row['spearman']:.2f}", f"{low} to {high}", f"{row['jaccard']:.2f}"
        )
    return shown


def _claims(claims: list[Document]) -> Table:
    shown = table("claim", "where", "printed", "found", "goal", "holds")
    for claim in claims:
        shown.add_row(
            claim["what"], claim["where"], claim["published"], claim["found"], claim["note"].removeprefix("goal "),
            "yes" if claim["agrees"] else "no",
        )  # fmt: skip
    return shown


def _span(ends: list[float] | None) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}" if ends else ""
