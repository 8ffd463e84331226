"""The verdict of a validation, and the contention of the machine that it was measured on."""

from __future__ import annotations

from reports.blocks import Block, Document, Text
from reports.layout import bullets
from reports.pages.theme import MEASURED, PREDICTED

SIDES = {"live": ("measured", MEASURED, "solid"), "twin": ("forecast", PREDICTED, "dashed")}
"""Label, colour and line of each side."""


def verdict_blocks(document: Document, side: str) -> list[Block]:
    """The goals that the prediction (`side`) misses, and the verdict."""
    missed = document["missed"]
    return [
        Text(f"Goals that the {side} misses", "heading"), bullets(missed) if missed else Text("none"),
        Text("\n\n" + verdict_line(document), "warning" if missed else "answer"),
    ]  # fmt: skip


def verdict_line(document: Document) -> str:
    """A sentence: the goals are met or missed, or a contended machine leaves it undecided."""
    missed, contention = len(document["missed"]), document.get("contention")
    if not missed:
        return "Verdict: all goals are met."
    goals = f"{missed} goal{'s' * (missed > 1)}"
    if document.get("verdict") != "undecided" or contention is None:
        return f"Verdict: {goals} missed."
    reasons = "; ".join(contention["reasons"])
    return (
        f"Verdict: undecided. {goals} missed, but other programs disturbed the measurement: {reasons}."
        " Repeat it with --fresh on an idle machine."
    )


def contention_line(document: Document) -> list[str]:
    """The contention that was measured; nothing for documents of earlier versions."""
    contention = document.get("contention")
    if contention is None:
        return []
    waits = contention["waited_share"]
    waits_note = "" if waits is None else f"waits for a processor {100 * waits:.1f} %, "
    return [
        f"contention: {waits_note}involuntary switches {contention['involuntary_switches_per_second']:.1f} a second,"
        f" CPU time of equal work spread by {100 * contention['equal_work_spread']:.1f} %"
        f" ({'contended' if contention['contended'] else 'not contended'})"
    ]
