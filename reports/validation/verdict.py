"""The verdict of a validation, and the contention of the machine that it was measured on."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reports.pages.frame import Part

Document = dict[str, Any]


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
    found = document.get("contention")
    if found is None:
        return []
    waited = "" if found["waited_share"] is None else f"waits for a processor {100 * found['waited_share']:.1f} %, "
    return [
        f"contention: {waited}involuntary switches {found['involuntary_switches_per_second']:.1f} a second,"
        f" CPU time of equal work spread by {100 * found['equal_work_spread']:.1f} %"
        f" ({'contended' if found['contended'] else 'not contended'})"
    ]


def verdict_parts(document: Document) -> list[Part]:
    """The beginning of a validation's page: the verdict, the contention, and the goals that were missed."""
    style = "answer" if not document["missed"] else "warning"
    parts: list[Part] = [f'<p class="{style}">{escape(verdict_line(document))}</p>']
    if document["missed"]:
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in document["missed"]) + "</ul>")
    return parts + [f'<p class="note">{escape(line)}</p>' for line in contention_line(document)]
