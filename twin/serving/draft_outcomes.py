"""Measured outcomes of drafts: what speculation would have drafted at every position of some answers, and how much of
it was right.

An answer does not depend on how it was computed. So the draft at a position, and how many of its tokens the answer goes
on with, are properties of the text. A simulation that gives a request the outcomes of a measured answer keeps what
shares by position lose: that n-grams are found more often late in an answer than early, and that answers differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from schedulers.speculation import AnswerDrafts


@dataclass(frozen=True)
class DraftOutcomes:
    """The outcomes of several answers, of at least one position each."""

    answers: list[AnswerDrafts]

    def resampled(self, seed: int) -> DraftOutcomes:
        """The same number of answers, drawn with replacement: outcomes that might as well have been measured."""
        size = len(self.answers)
        chosen = np.random.default_rng([seed, 53]).integers(size, size=size).tolist()
        return DraftOutcomes([self.answers[i] for i in chosen])

    def shares(self, num_speculative_tokens: int) -> tuple[float, list[float]]:
        """The share of positions that have a draft, and that of drafts whose token at each position is right."""
        drafts = [
            right
            for answer in self.answers
            for drafted, right in zip(answer.drafted[1:], answer.right[1:], strict=True)
            if drafted
        ]
        positions = sum(len(answer.drafted) - 1 for answer in self.answers)
        found = np.array(drafts)
        by_position = [float((found > i).mean()) if drafts else 0.0 for i in range(num_speculative_tokens)]
        return len(drafts) / max(positions, 1), by_position
