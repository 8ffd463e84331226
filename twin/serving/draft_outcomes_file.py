"""The file of measured draft outcomes, `twin.draft-outcomes/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from latency_models.io.config_io import Strict, checked
from schedulers.speculation import AnswerDrafts
from twin.serving.draft_outcomes import DraftOutcomes
from workloads.json_files import read_json_object

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
    """The file `twin.draft-outcomes/1`, JSON.

    Attributes:
        method, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max: of the drafts, as in
            `engine.speculative_config`.
        source: how it was measured.
        answers: by position, tokens drafted, and how many of them were right.
    """

    schema_: Literal["twin.draft-outcomes/1"] = Field(alias="schema")
    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: PositiveInt
    prompt_lookup_min: PositiveInt
    prompt_lookup_max: PositiveInt
    source: str
    answers: list[_Answer] = Field(min_length=1)


def read_draft_outcomes(file: Path) -> tuple[DraftOutcomesFile, DraftOutcomes]:
    """Read and check a file.

    Raises:
        BadInput: a file that cannot be read, or breaks the schema.
    """
    read = checked(DraftOutcomesFile, read_json_object(file), file)
    return read, DraftOutcomes([AnswerDrafts(each.drafted, each.right) for each in read.answers])


def document(outcomes: DraftOutcomes, settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The content of a file. `settings`: the fields of `DraftOutcomesFile` that say how was drafted."""
    answers = [{"drafted": each.drafted, "right": each.right} for each in outcomes.answers]
    return {"schema": SCHEMA, **settings, "source": source, "answers": answers}
