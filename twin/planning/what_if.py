"""Changes of a question that `--what` states: `rate=+50%`, `prompts=2x,answers=0.5x`, `hit_rate=0.2`."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from twin.planning.question import Question
from workloads.errors import BadInput

BLOCK = 16
"""Tokens of a block, as of an engine's default."""

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
    trace = question.trace
    if question.document["workload"].get("sessions") or (trace is not None and trace.prefix_blocks is not None):
        expected = "expected a workload without sessions or recorded prefixes, from which its hits follow"
        raise BadInput(expected, field="--what", value=part)
    block_tokens = (question.document.get("engine") or {}).get("block_size", BLOCK)
    tokens, highest = _shared_tokens(question.lengths().prompts, share, block_tokens)
    if tokens is None:
        expected = f"expected at most {highest:.2f}: prompts share a beginning no longer than the mean prompt"
        raise BadInput(expected, field="--what", value=part)
    return question.with_shared_beginning(tokens, block_tokens)


def _shared_tokens(prompts: NDArray[np.int64], share: float, block: int) -> tuple[int | None, float]:
    """Tokens of a common beginning of which caches supply a share of all prompt tokens; the highest share.

    None where a beginning no longer than the mean prompt supplies less.
    """
    beginnings = np.arange(0, int(prompts.mean()) + 1, block)
    shares = [float((np.minimum(tokens, prompts - 1) // block * block).sum() / prompts.sum()) for tokens in beginnings]
    if share > shares[-1]:
        return None, shares[-1]
    return int(beginnings[int(np.argmin(np.abs(np.array(shares) - share)))]), shares[-1]


CHANGES: dict[str, Callable[[Question, str, str], Question]] = {
    "rate": _rate,
    "prompts": _lengths("prefill"),
    "answers": _lengths("decode"),
    "hit_rate": _hit_rate,
}
