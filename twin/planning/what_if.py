"""Changes of a question that `--what` states: `rate=+50%`, `prompts=2x,answers=0.5x`, `hit_rate=0.2`."""

from __future__ import annotations

import re
from collections.abc import Callable

from twin.planning.question import Question
from workloads.errors import BadInput

EXPECTED = "expected rate, prompts or answers with a factor (2x), a change (+50%) or a rate; or hit_rate with a share"


def with_changes(question: Question, text: str) -> Question:
    """The question after the changes of one `--what`, with commas between.

    Raises `BadInput` for what cannot be changed, or not to this value.
    """
    variant = question
    for part in text.split(","):
        name, equals, amount = (word.strip() for word in part.partition("="))
        change = CHANGES.get(name)
        if change is None or not equals:
            raise BadInput(EXPECTED, field="--what", value=part)
        variant = change(variant, amount, part)
    return variant


def _factor(amount: str, part: str) -> float | None:
    """The factor of `2x` or `+50%`; None for a plain number."""
    match = re.fullmatch(r"(?:(?P<times>\d+\.?\d*|\.\d+)x)|(?:(?P<percent>[+-]\d+\.?\d*) ?%)", amount)
    if match is None:
        return None
    factor = float(match["times"]) if match["times"] else 1 + float(match["percent"]) / 100
    if not 0.001 <= factor <= 1000:
        raise BadInput("expected a factor of 0.001 to 1000", field="--what", value=part)
    return factor


def _rate(question: Question, amount: str, part: str) -> Question:
    if question.rate is None:
        raise BadInput("expected arrivals with a rate, which a scenario with these has not", field="--what", value=part)
    factor = _factor(amount, part)
    try:
        rate = float(amount) if factor is None else factor * question.rate
    except ValueError:
        raise BadInput("expected a rate, as 30, 2x or +50%", field="--what", value=part) from None
    if not 0 < rate < float("inf"):
        raise BadInput("expected a rate above 0", field="--what", value=part)
    return question.at_rate(float(f"{rate:.12g}"))


def _lengths(side: str) -> Callable[[Question, str, str], Question]:
    def change(question: Question, amount: str, part: str) -> Question:
        factor = _factor(amount, part)
        if factor is None:
            raise BadInput("expected a factor, as 2x or +50%", field="--what", value=part)
        return question.with_lengths(factor, (side,))

    return change


def _hit_rate(question: Question, amount: str, part: str) -> Question:
    try:
        share = float(amount)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise BadInput("expected a share of prompt tokens, 0 to below 1", field="--what", value=part)
    try:
        return question.with_hit_rate(share)
    except BadInput as error:
        raise BadInput(error.expected, field="--what", value=part) from None


CHANGES: dict[str, Callable[[Question, str, str], Question]] = {
    "rate": _rate,
    "prompts": _lengths("prefill"),
    "answers": _lengths("decode"),
    "hit_rate": _hit_rate,
}
