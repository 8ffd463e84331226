"""Sections of a workload on time: `sessions`, and `profile` and `bursts` of `arrivals`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.fields import SESSION_IDS, BlockTokens, PositiveTokens
from scenarios.requests import LengthSpec
from workloads.arrivals import LONGEST, SMALLEST_CV, Arrivals, Pauses
from workloads.errors import BadInput
from workloads.lengths import Lengths
from workloads.mixes import ModelMix
from workloads.prefixes import SharedPrefixes
from workloads.rates import Bursts, Profile
from workloads.sessions import MAX_BRANCHES, Branches, DrawnSessions, ToolCalls

if TYPE_CHECKING:
    from workloads.recorded_sessions import RecordedSessions
    from workloads.trace import Trace


class ProfileSpec(Strict):
    """A rate that changes over time and repeats; only its shape counts, since `rate` is its mean."""

    points: list[Annotated[list[float], Field(min_length=2, max_length=2)]] | None = Field(None, max_length=100_000)
    between: Literal["ramps", "steps"] = "ramps"
    swing: float | None = None
    peak_at: float = 50400.0
    period: PositiveFloat = 86400.0
    start: NonNegativeFloat | Literal["random"] = 0.0

    @model_validator(mode="after")
    def _one_shape(self) -> ProfileSpec:
        if (self.points is None) == (self.swing is None):
            raise ValueError("expected either points or swing")
        self.build()
        return self

    def build(self) -> Profile:
        if self.points is None:
            assert self.swing is not None
            return Profile.of_day(self.swing, self.peak_at, self.period)
        return Profile.of_points([(time, rate) for time, rate in self.points], self.between)


class BurstsSpec(Strict):
    """Times with `factor` times the rate of others, of `seconds` on average, beginning each `every` s on average."""

    factor: float
    seconds: float
    every: float

    @model_validator(mode="after")
    def _can_be(self) -> BurstsSpec:
        self.build()
        return self

    def build(self) -> Bursts:
        return Bursts(self.factor, self.seconds, self.every)


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
        return Pauses(self.mean, self.cv)


class ToolCallsSpec(Strict):
    """Tool calls: the `share` of later turns that follow one, its seconds, and the tokens of its result."""

    share: Share
    pause: PauseSpec
    growth: LengthSpec

    def build(self) -> ToolCalls:
        return ToolCalls(self.share, self.pause.build(), self.growth.build())


class BranchesSpec(Strict):
    """Branches: the `share` of later turns that send `count` requests from one point of the conversation."""

    share: Share
    count: Annotated[int, Field(ge=2, le=MAX_BRANCHES)]

    def build(self) -> Branches:
        return Branches(self.share, self.count)


class DrawnSessionsSpec(Strict):
    """Sessions from distributions. `workload.prefill` is the length of first prompts, `workload.decode` of answers."""

    source: Literal["drawn"]
    turns: LengthSpec
    growth: LengthSpec
    think: PauseSpec = Field(default_factory=lambda: PauseSpec(mean=0.0))
    tools: ToolCallsSpec | None = None
    branches: BranchesSpec | None = None
    max_model_len: PositiveTokens | None = None
    block_tokens: BlockTokens = 16

    def check_blocks(self, requests: int, first: LengthSpec, answers: LengthSpec) -> None:
        """Refuse sessions whose prompts grow, on average, to more blocks than a simulation can follow."""
        growth = max(spec.build().mean for spec in (self.growth, *([self.tools.growth] if self.tools else [])))
        turns = min(self.turns.build().mean, requests)
        tokens = first.build().mean + (turns - 1) * growth + turns * answers.build().mean
        blocks = int(min(tokens, self.max_model_len or tokens) / self.block_tokens)
        if blocks > SESSION_IDS.maximum:
            turn = f"the last of {turns:,.0f} turns has some {blocks:,} of {self.block_tokens} tokens"
            raise BadInput(f"{SESSION_IDS.expectation(blocks)}; {turn}", field="sessions")

    def build(
        self, first: Lengths, answers: Lengths, *, arrivals: Arrivals, models: ModelMix | None,
        prefixes: SharedPrefixes | None, max_tokens: int | None,
    ) -> DrawnSessions:  # fmt: skip
        """Sessions with `first` prompts and `answers` of these lengths."""
        return DrawnSessions(
            turns=self.turns.build(),
            first=first,
            growth=self.growth.build(),
            answers=answers,
            think=self.think.build(),
            tools=self.tools.build() if self.tools else None,
            branches=self.branches.build() if self.branches else None,
            arrivals=arrivals,
            models=models,
            prefixes=prefixes,
            max_tokens=max_tokens,
            max_model_len=self.max_model_len,
            block_tokens=self.block_tokens,
        )


class RecordedSessionsSpec(Strict):
    """The sessions of the trace, by its `session_ids`, or recovered from its `prefix_ids`. See `RecordedSessions`."""

    source: Literal["session_ids", "prefix_ids"]
    think: PauseSpec | Literal["recorded"] | None = None
    max_pause: PositiveFloat | None = None
    block_tokens: BlockTokens = 16
    shuffle: bool = False
    max_model_len: PositiveTokens | None = None
    advance: Annotated[list[Share], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _cuts_recorded_pauses(self) -> RecordedSessionsSpec:
        if self.max_pause is not None and self.think != "recorded":
            raise BadInput("expected none without think: recorded", field="max_pause", value=self.max_pause)
        if self.advance is not None and self.advance[0] > self.advance[1]:
            raise BadInput("expected the lower share first", field="advance", value=self.advance)
        if self.advance is not None and self.think is None:
            raise BadInput("expected none for requests at recorded times", field="advance", value=self.advance)
        return self

    def build(
        self, trace: Trace, speed: float, *, arrivals: Arrivals, models: ModelMix | None, max_tokens: int | None
    ) -> RecordedSessions:
        """The sessions of a trace; `speed` 2 sends turns at recorded times twice as fast."""
        from workloads.recorded_sessions import RecordedSessions

        return RecordedSessions(
            trace,
            self.source,
            self.think.build() if isinstance(self.think, PauseSpec) else self.think,
            speed,
            arrivals,
            models,
            max_tokens,
            self.block_tokens,
            inf if self.max_pause is None else self.max_pause,
            self.shuffle,
            self.max_model_len,
            (0.0, 0.0) if self.advance is None else (self.advance[0], self.advance[1]),
        )


SessionsSpec = Annotated[DrawnSessionsSpec | RecordedSessionsSpec, Field(discriminator="source")]
