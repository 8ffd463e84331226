"""Tables of the reproduced AFD paper: published beside computed, and the disagreements. Its figures are a sweep's."""

from __future__ import annotations

from papers.claims import claim, claims_table, disagreements
from papers.layout import rows_table
from reports.blocks import Report, Table
from reports.layout import Document, sections


def tables(document: Document) -> Report:
    """The optimal ratios, then the claims of figures 4 to 7, then the disagreements in words."""
    claims = [*document["claims"], *map(_ratio_claim, document["optimal_ratios"])]
    return sections(
        [
            ("Optimal ratios, eq. 19", _ratios(document["optimal_ratios"])),
            ("Figures 4 to 7, simulated", claims_table(document["claims"])),
            ("What disagrees", disagreements(claims)),
        ]
    )


def _ratio_claim(row: Document) -> Document:
    explained, unexplained = "unrounded parameters could explain it", "no rounding of Table 4 explains it"
    return claim(
        "eq. 19", f"r* at B = {row['batch_size']}", f"{row['published']:.2f}", f"{row['computed']:.4f}",
        row["prints_the_same"], explained if row["within_rounding"] else unexplained,
    )  # fmt: skip


def _ratios(rows: list[Document]) -> Table:
    return rows_table(
        "B | μ_P | μ_D | printed | computed | same digits",
        "{batch_size} | {mean_prefill:g} | {mean_decode:g} | {published:.2f} | {computed:.4f} | {prints_the_same:yes}",
        rows,
    )
