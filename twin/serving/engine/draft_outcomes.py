"""Measured outcomes of drafts: what speculation would have drafted at every position of some answers, and how much of
it was right.

An answer does not depend on how it was computed. So the draft at a position, and how many of its tokens the answer goes
on with, are properties of the text. A simulation that gives a request the outcomes of a measured answer keeps what
shares by position lose: that n-grams are found more often late in an answer than early, and that answers differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from latency_models.io.config_io import Strict, checked
from schedulers.speculation import AnswerDrafts
from workloads.json_files import read_json_object


@dataclass(frozen=True)
class DraftOutcomes:
    """The outcomes of several answers, of at least one position each."""

    answers: list[AnswerDrafts]

    def resampled(self, seed: int) -> DraftOutcomes:
        """The same number of answers, drawn with replacement: outcomes that might as well have been measured."""
        size = len(self.answers)
        indices = np.random.default_rng([seed, 53]).integers(size, size=size).tolist()
        return DraftOutcomes([self.answers[i] for i in indices])

    def shares(self, num_speculative_tokens: int) -> tuple[float, list[float]]:
        """The share of positions that have a draft, and that of drafts whose token at each position is right."""
        drafts = [
            right
            for answer in self.answers
            for drafted, right in zip(answer.drafted[1:], answer.right[1:], strict=True)
            if drafted
        ]
        positions = sum(len(answer.drafted) - 1 for answer in self.answers)
        accepted = np.array(drafts)
        by_position = [float((accepted > i).mean()) if drafts else 0.0 for i in range(num_speculative_tokens)]
        return len(drafts) / max(positions, 1), by_position


SCHEMA = "twin.draft-outcomes/1"


class _Answer(Strict):
    drafted: list[NonNegativeInt] = Field(min_length=1)
    right: list[NonNegativeInt]

    @model_validator(mode="after")
    def _agree(self) -> _Answer:
        if len(self.drafted) != len(self.right):
            raise ValueError(f"expected as many values of right as of drafted ({len(self.drafted)})")
        if any(right > drafted for drafted, right in zip(self.drafted, self.right, strict=True)):
            raise ValueError("expected at most as many right tokens as drafted ones")
        return self


class DraftOutcomesFile(Strict):
    """The file `twin.draft-outcomes/1`, JSON: settings of the drafts as in `engine.speculative_config`, how they were
    measured (`source`), and by position of each answer the tokens drafted, and how many of them were right.
    """

    schema_: Literal["twin.draft-outcomes/1"] = Field(alias="schema")
    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: PositiveInt
    prompt_lookup_min: PositiveInt
    prompt_lookup_max: PositiveInt
    source: str
    answers: list[_Answer] = Field(min_length=1)


def read_draft_outcomes(file: Path) -> tuple[DraftOutcomesFile, DraftOutcomes]:
    """Read a file; `BadInput` for one that cannot be read, or breaks the schema."""
    content = checked(DraftOutcomesFile, read_json_object(file), file)
    return content, DraftOutcomes([AnswerDrafts(answer.drafted, answer.right) for answer in content.answers])


def document(outcomes: DraftOutcomes, settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The content of a file. `settings`: the fields of `DraftOutcomesFile` that say how was drafted."""
    answers = [{"drafted": answer.drafted, "right": answer.right} for answer in outcomes.answers]
    return {"schema": SCHEMA, **settings, "source": source, "answers": answers}
