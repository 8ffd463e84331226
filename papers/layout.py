"""Parts of a paper's report: claims beside results, and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, stdev
from typing import Any

from reports.blocks import Table, Text
from reports.layout import bullets, table


def step_shares(losses: Sequence[float]) -> list[float]:
    """The middles of the equal parts of a training that `losses` are means over, in shares of its steps."""
    return [(index + 0.5) / len(losses) for index in range(len(losses))]


Claim = dict[str, Any]


def claim(where: str, statement: str, published: str, result: str, agrees: bool, note: str = "") -> Claim:
    """A claim as it is in a document: where the paper makes it, what is printed and found, and whether that agrees."""
    return {
        "where": where,
        "what": statement,
        "published": published,
        "found": result,
        "agrees": bool(agrees),
        "note": note,
    }


def claims_table(claims: Iterable[Claim], columns: dict[str, Callable[[Claim], str]] | None = None) -> Table:
    """All claims, one a row, with further columns by their titles."""
    columns = columns or {}
    rows = table("claim", "where", "published", "found", *columns, "holds")
    for row in claims:
        cells = [cell(row) for cell in columns.values()]
        rows.add_row(
            row["what"], row["where"], row["published"], row["found"], *cells, "yes" if row["agrees"] else "no"
        )
    return rows


def disagreements(claims: Iterable[Claim]) -> Text:
    """The claims that the results contradict, one a line, or `nothing`."""
    lines = [
        f"{row['where']}, {row['what']}: {row['published']} printed, {row['found']} found"
        + (f"; {row['note']}" if row["note"] else "")
        for row in claims
        if not row["agrees"]
    ]
    return bullets(lines) if lines else Text("nothing")


def percent_range(ends: Sequence[float] | None) -> str:
    """Two shares in per cent, such as `1.0 to 2.5`; nothing for None."""
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}" if ends else ""


CONFIDENCE = 0.95


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student's interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.5 + confidence / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half
