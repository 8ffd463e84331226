"""The `workload.sessions` section of a serving scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.lengths import LengthSpec
from scenarios.limits import BlockTokens, PositiveTokens
from workloads.pauses import SMALLEST_CV, Pauses
from workloads.sessions import MAX_BRANCHES, Branches, ToolCalls

Share = Annotated[float, Field(ge=0, le=1)]


class PauseSpec(Strict):
    """Gamma-distributed pauses of `mean` seconds; `cv` 1 is exponential, and with 0 all are alike."""

    mean: NonNegativeFloat
    cv: float = Field(default=1.0, ge=0, le=100)

    @model_validator(mode="after")
    def _can_vary(self) -> PauseSpec:
        if 0 < self.cv < SMALLEST_CV:
            raise ValueError(f"cv: expected 0, or at least {SMALLEST_CV}")
        return self

    def build(self) -> Pauses:
        """The distribution of the pauses."""
        return Pauses(self.mean, self.cv)


class ToolCallsSpec(Strict):
    """Tool calls: the `share` of later turns that follow one, its seconds, and the tokens of its result."""

    share: Share
    pause: PauseSpec
    growth: LengthSpec

    def build(self) -> ToolCalls:
        """The tool calls of drawn sessions."""
        return ToolCalls(self.share, self.pause.build(), self.growth.build())


class BranchesSpec(Strict):
    """Branches: the `share` of later turns that send `count` requests from one point of the conversation."""

    share: Share
    count: Annotated[int, Field(ge=2, le=MAX_BRANCHES)]

    def build(self) -> Branches:
        """The branches of drawn sessions."""
        return Branches(self.share, self.count)


class DrawnSessionsSpec(Strict):
    """Sessions from distributions. `workload.prefill` is the length of first prompts, `workload.decode` of answers.

    Attributes:
        turns: rounds of a session. growth: tokens that a later turn adds to what was said.
        think: between an answer and the next turn. tools, branches: what some of the later turns are.
        max_model_len: a session ends before a request whose prompt and answer would exceed it.
        block_tokens: tokens that one prefix id stands for.
    """

    source: Literal["drawn"]
    turns: LengthSpec
    growth: LengthSpec
    think: PauseSpec = Field(default_factory=lambda: PauseSpec(mean=0.0))
    tools: ToolCallsSpec | None = None
    branches: BranchesSpec | None = None
    max_model_len: PositiveTokens | None = None
    block_tokens: BlockTokens = 16


class RecordedSessionsSpec(Strict):
    """The sessions of the trace, by its `session_ids`, or recovered from its `prefix_ids`. See `RecordedSessions`.

    Attributes:
        think: between an answer and the next turn; left out, turns are sent at their recorded times.
        block_tokens: tokens that one prefix id stands for, where the trace has none.
    """

    source: Literal["session_ids", "prefix_ids"]
    think: PauseSpec | None = None
    block_tokens: BlockTokens = 16


SessionsSpec = Annotated[DrawnSessionsSpec | RecordedSessionsSpec, Field(discriminator="source")]
