"""Tables of the reproduced AFD paper: published beside computed, and the disagreements."""

from __future__ import annotations

from reports.blocks import Column, Document, Report, Table, Text
from reports.layout import Section, bullets, sections


def reproduction_tables(summary: Document) -> Report:
    """The optimal ratios, then the claims of figures 4 to 7, then the disagreements in words."""
    disagreements = [claim for claim in summary["claims"] if not claim["agrees"]]
    lines = [f"{claim['where']}, {claim['what']}: {claim['note'] or claim['found']}" for claim in disagreements]
    lines += [
        f"r* at B = {row['batch_size']}: {row['published']:.2f} is printed, eq. 19 gives {row['computed']:.4f}; "
        + ("unrounded parameters could explain it" if row["within_rounding"] else "no rounding of Table 4 explains it")
        for row in summary["optimal_ratios"]
        if not row["prints_the_same"]
    ]
    titled: list[Section] = [
        ("Optimal ratios, eq. 19", _ratios(summary["optimal_ratios"])),
        ("Figures 4 to 7, simulated", _claims(summary["claims"])),
        ("What disagrees", bullets(lines) if lines else Text("nothing")),
    ]
    return sections(titled)


def _ratios(rows: list[Document]) -> Table:
    table = Table([Column(title, left=True) for title in ("B", "μ_P", "μ_D", "printed", "computed", "same digits")])
    for row in rows:
        table.add_row(
            str(row["batch_size"]),
            f"{row['mean_prefill']:g}",
            f"{row['mean_decode']:g}",
            f"{row['published']:.2f}",
            f"{row['computed']:.4f}",
            "yes" if row["prints_the_same"] else "no",
        )
    return table


def _claims(claims: list[Document]) -> Table:
    table = Table([Column(title, left=True) for title in ("where", "what", "printed", "found", "agrees")])
    for claim in claims:
        agrees = "yes" if claim["agrees"] else "no"
        table.add_row(claim["where"], claim["what"], claim["published"], claim["found"], agrees)
    return table
