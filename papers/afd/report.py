"""Tables of the reproduced AFD paper: published beside computed, and the disagreements. Its figures are a sweep's."""

from __future__ import annotations

from typing import Any

from papers.layout import claim, claims_table, disagreements
from reports.blocks import Document, Report, Table
from reports.layout import render, rows_table, sections


def tables(document: Document) -> Report:
    """The optimal ratios, then the claims of figures 4 to 7, then the disagreements in words. Of a trace, figure 3."""
    if "lengths" in document:
        return _of_trace(document)
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


def _of_trace(document: Document) -> Report:
    fit = document["lengths"]
    return sections(
        [
            (
                f"Figure 3: {document['requests']:,} answers of {document['trace']}, mean {fit['mean']:.1f} tokens",
                rows_table(
                    "quantile | trace | geometric", "{level:g} | {trace:.0f} | {geometric:.0f}", fit["quantiles"]
                ),
            ),
            (
                "r* with the latencies and B of section 5.3",
                rows_table(
                    "lengths | tokens of a slot | r* | throughput if built",
                    "{assumption} | {slot_load:.0f} | {r_star:.2f} | {throughput:100 .1f} %",
                    document["ratios"],
                ),
            ),
            ("Claims", claims_table(document["claims"])),
            ("What disagrees", disagreements(document["claims"])),
        ]
    )


def figures(document: Document) -> dict[str, str]:
    return {"lengths": render(_draw_lengths, document, 2), "latencies": render(_draw_latencies, document, 2)}


def _draw_lengths(panels: list[Any], document: Document) -> None:
    """P(D ≥ length), a straight line if D is geometric, and its quantiles over those of the fit."""
    fit = document["lengths"]
    survival, quantiles = panels
    lengths = [row["length"] for row in fit["survival"]]
    survival.semilogy(lengths, [row["trace"] for row in fit["survival"]], "o", ms=3, label="trace")
    survival.semilogy(lengths, [row["geometric"] for row in fit["survival"]], "-", lw=1.2, label="geometric")
    survival.set(xlabel="tokens of an answer", ylabel="share of answers of at least that length")
    survival.set_ylim(bottom=0.5 / document["requests"])
    survival.legend()
    levels = [row["geometric"] for row in fit["quantiles"]]
    quantiles.plot(levels, [row["trace"] for row in fit["quantiles"]], "o", ms=4)
    quantiles.plot([0, max(levels)], [0, max(levels)], "-", color="grey", lw=0.8)
    quantiles.set(xlabel="quantile of the geometric fit, tokens", ylabel="quantile of the trace, tokens")


def _draw_latencies(panels: list[Any], document: Document) -> None:
    for panel, names, label in zip(
        panels, (["attention"], ["ffn", "communication"]), ("token load T", "requests B"), strict=True
    ):
        for name in names:
            panel.plot(*zip(*document["latencies"][name], strict=True), lw=1.4, label=name)
        panel.set(xlabel=label, ylabel="cycles", xlim=(0, None), ylim=(0, None))
        panel.legend()
