"""The generated part of docs/explanation/error-board.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "error-board.md"
BEGIN, END = "<!-- error board: generated -->", "<!-- error board: end -->"

KINDS = {
    "aggregated": "aggregated",
    "disaggregated": "disaggregated, workers known",
    "assumed": "disaggregated, assumed",
}
QUANTITIES = {"tpot": "TPOT", "ttft": "TTFT"}


def table(document: Mapping[str, Any]) -> str:
    """Markdown: the errors over all rows. The document has them by model, the worst cells and what is refused."""
    return _overall(document)


def write(document: Mapping[str, Any]) -> None:
    """Write the part of the page between its two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{after}")


def summary(source: str, cells: Sequence[Mapping[str, Any]]) -> str:
    """The file that comes with the package, a line for each cell."""
    lines = ",\n  ".join(map(json.dumps, cells))
    return f'{{"schema": "twin.error-board/1", "source": {json.dumps(source)}, "cells": [\n  {lines}\n]}}\n'


def _markdown(head: str, lines: Sequence[Sequence[str]]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *(f"| {' | '.join(line)} |" for line in lines)])


def _numbers(summary: Mapping[str, float]) -> list[str]:
    numbers = [f"{100 * summary['bias']:+.0f}", f"{100 * summary['median']:.1f}", f"{100 * summary['p90']:.0f}"]
    known = "coverage" in summary
    return [*numbers, f"{100 * summary['coverage']:.0f}" if known else "", f"{summary['width']:.2f}" if known else ""]


def _overall(document: Mapping[str, Any]) -> str:
    lines = []
    for kind, name in KINDS.items():
        for quantity, title in QUANTITIES.items():
            for group, summary in document[kind][quantity].items():
                if group in ("model", "system") and (kind == "assumed" or quantity == "ttft"):
                    continue  # in board.json
                stated = group if group == "source alone" else f"{group} left out"
                lines.append([f"{title}, {name}: {stated}", f"{summary['rows']:,}", *_numbers(summary)])
    own = document["own cell"]
    lines.append(["TPOT, aggregated: source alone, in the interval of its cell", f"{own['rows']:,}", *_numbers(own)])
    return _markdown("what | rows | bias, % | median, % | P90, % | coverage, % | width", lines)
