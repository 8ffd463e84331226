"""The `workload.sessions` section of a serving scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from latency_models.io.config_io import Strict
from scenarios.lengths import LengthSpec
from scenarios.limits import SESSION_IDS, BlockTokens, PositiveTokens
from workloads.errors import BadInput
from workloads.pauses import LONGEST, SMALLEST_CV, Pauses
from workloads.sessions import MAX_BRANCHES, Branches, ToolCalls

Share = Annotated[float, Field(ge=0, le=1)]


class PauseSpec(Strict):
    """Gamma-distributed pauses of `mean` seconds; `cv` 1 is exponential, and with 0 all are alike."""

    mean: Annotated[float, Field(ge=0, le=LONGEST)]
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

    def check_blocks(self, requests: int, first: LengthSpec, answers: LengthSpec) -> None:
        """Refuse sessions whose prompts grow, on average, to more blocks than a simulation can follow.

        Raises:
            BadInput: they do.
        """
        growth = max(spec.build().mean for spec in (self.growth, *([self.tools.growth] if self.tools else [])))
        turns = min(self.turns.build().mean, requests)
        tokens = first.build().mean + (turns - 1) * growth + turns * answers.build().mean
        blocks = int(min(tokens, self.max_model_len or tokens) / self.block_tokens)
        if blocks > SESSION_IDS.most:
            found = f"the last of {turns:,.0f} turns has some {blocks:,} of {self.block_tokens} tokens"
            raise BadInput(f"{SESSION_IDS.expectation(blocks)}; {found}", field="sessions")


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
