"""Sections of a workload on its requests: tasks, clients, classes, prefixes, traces, sessions, and rates over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.files import FilePath
from scenarios import fields
from workloads.arrivals import LONGEST, SMALLEST_CV, Bursts, Pauses, Profile
from workloads.errors import BadInput
from workloads.lengths import Lengths
from workloads.mixes import REMEMBERED_RUBRICS, SharedPrefixes, TaskShare
from workloads.pairs import Independent, LengthPairs
from workloads.sessions import MAX_BRANCHES, Branches, DrawnSessions, ToolCalls
from workloads.traces import AUTO, TRACE_FORMATS, Trace, read_trace

if TYPE_CHECKING:
    from workloads.recorded_sessions import RecordedSessions


class ServiceClassSpec(Strict):
    """The contract of a class of requests: its place in the order, and its goals in seconds."""

    priority: int = 0
    ttft: PositiveFloat | None = None
    tpot: PositiveFloat | None = None
    e2e: PositiveFloat | None = None

    @property
    def goals(self) -> dict[str, float]:
        """The goals that were given, by the name of the latency."""
        return {name: limit for name in ("ttft", "tpot", "e2e") if (limit := getattr(self, name)) is not None}


class TaskSpec(Strict):
    """A kind of request: its share by `weight`, its prompts, answers if any, and its class or priority."""

    task: Literal["generate", "classify", "embed", "score", "rerank", "prompt_logprobs"]
    weight: PositiveFloat
    prefill: fields.LengthSpec
    decode: fields.LengthSpec | None = None
    priority: int = 0
    service_class: str | None = None
    tenant: str = ""

    @model_validator(mode="after")
    def _answers(self) -> TaskSpec:
        if (self.task == "generate") != (self.decode is not None):
            raise ValueError("expected decode, the lengths of answers, for the task generate and for no other")
        return self

    def build(self, classes: Mapping[str, ServiceClassSpec]) -> TaskShare:
        """The share of a mix, given the classes by name."""
        prompts = self.prefill.build()
        lengths = Independent(prompts, self.decode.build()) if self.decode else prompts
        return _share(self, self.task, lengths, classes)


class ClientSpec(Strict):
    """Clients with a part of the requests, by `weight`. All have requests of the same lengths."""

    weight: PositiveFloat = 1.0
    tenant: str = ""
    service_class: str | None = None
    priority: int = 0

    def build(self, lengths: LengthPairs, classes: Mapping[str, ServiceClassSpec]) -> TaskShare:
        """The share of a mix, given the lengths of all requests and the classes by name."""
        return _share(self, "generate", lengths, classes)


def _share(
    spec: TaskSpec | ClientSpec, task: str, lengths: LengthPairs | Lengths, classes: Mapping[str, ServiceClassSpec]
) -> TaskShare:
    if spec.service_class is None:
        return TaskShare(task, spec.weight, lengths, spec.priority, spec.tenant)
    contract = classes[spec.service_class]
    goal = math.inf if contract.ttft is None else contract.ttft
    return TaskShare(task, spec.weight, lengths, contract.priority, spec.tenant, spec.service_class, goal)


class PrefixesSpec(Strict):
    """Prompts that begin alike: `groups` rubrics of `tokens` tokens, of Zipf popularity. See `SharedPrefixes`."""

    groups: fields.PrefixGroups
    tokens: fields.PositiveTokens
    block_tokens: fields.BlockTokens = 16
    zipf: float = Field(default=0.0, ge=0)
    cache_suffix: bool = False

    @model_validator(mode="after")
    def _ids_fit(self) -> PrefixesSpec:
        rubric = self.tokens // self.block_tokens
        total = rubric * min(self.groups, REMEMBERED_RUBRICS)
        if total > fields.PREFIX_IDS.maximum:
            raise BadInput(
                f"{fields.PREFIX_IDS.expectation(total)}; a rubric has {rubric:,}", field="tokens", value=self.tokens
            )
        return self

    def build(self) -> SharedPrefixes:
        return SharedPrefixes(**self.model_dump())

    def check_prompts(self, longest: float, mean: float) -> None:
        """Refuse prompts with too many ids (`cache_suffix`), and prompts that most rubrics do not fit in."""
        ids = int(longest) // self.block_tokens
        if self.cache_suffix and ids > fields.PREFIX_IDS.maximum:
            expected = f"{fields.PREFIX_IDS.expectation(ids)}; a prompt of {longest:g} tokens has {ids:,}"
            raise BadInput(expected, field="prefixes.block_tokens", value=self.block_tokens)
        if self.tokens > mean:
            expected = f"expected at most the mean prompt ({mean:g} tokens), which includes the prefix"
            raise BadInput(expected, field="prefixes.tokens", value=self.tokens)


class TraceSpec(Strict):
    """A recorded workload. `pairing` joint keeps each prompt with its answer, independent shuffles them."""

    path: FilePath | None = None
    format: Annotated[str, fields.registered(TRACE_FORMATS, AUTO)] = AUTO
    pairing: Literal["joint", "independent"] = "joint"

    def read(self, base: Path) -> Trace:
        """The trace. Relative paths start from `base`."""
        if self.path is None:
            raise BadInput("expected a trace file: give --trace FILE", field="workload.trace.path")
        return read_trace(base / self.path, self.format)


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
    growth: fields.LengthSpec

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
    turns: fields.LengthSpec
    growth: fields.LengthSpec
    think: PauseSpec = Field(default_factory=lambda: PauseSpec(mean=0.0))
    tools: ToolCallsSpec | None = None
    branches: BranchesSpec | None = None
    max_model_len: fields.PositiveTokens | None = None
    block_tokens: fields.BlockTokens = 16

    def check_blocks(self, requests: int, first: fields.LengthSpec, answers: fields.LengthSpec) -> None:
        """Refuse sessions whose prompts grow, on average, to more blocks than a simulation can follow."""
        growth = max(spec.build().mean for spec in (self.growth, *([self.tools.growth] if self.tools else [])))
        turns = min(self.turns.build().mean, requests)
        tokens = first.build().mean + (turns - 1) * growth + turns * answers.build().mean
        blocks = int(min(tokens, self.max_model_len or tokens) / self.block_tokens)
        if blocks > fields.SESSION_IDS.maximum:
            turn = f"the last of {turns:,.0f} turns has some {blocks:,} of {self.block_tokens} tokens"
            raise BadInput(f"{fields.SESSION_IDS.expectation(blocks)}; {turn}", field="sessions")

    def build(self, first: Lengths, answers: Lengths, **others: Any) -> DrawnSessions:
        """Sessions with `first` prompts and `answers` of these lengths; `others`: fields that the workload gives."""
        return DrawnSessions(
            self.turns.build(), first, self.growth.build(), answers, self.think.build(),
            self.tools.build() if self.tools else None, self.branches.build() if self.branches else None,
            max_model_len=self.max_model_len, block_tokens=self.block_tokens, **others,
        )  # fmt: skip


class RecordedSessionsSpec(Strict):
    """The sessions of the trace, by its `session_ids`, or recovered from its `prefix_ids`. See `RecordedSessions`."""

    source: Literal["session_ids", "prefix_ids"]
    think: PauseSpec | Literal["recorded"] | None = None
    max_pause: PositiveFloat | None = None
    block_tokens: fields.BlockTokens = 16
    shuffle: bool = False
    max_model_len: fields.PositiveTokens | None = None
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

    def build(self, trace: Trace, speed: float, **others: Any) -> RecordedSessions:
        """The sessions of a trace; `speed` 2 sends turns at recorded times twice as fast. `others`: see above."""
        from workloads.recorded_sessions import RecordedSessions

        low, high = self.advance or (0.0, 0.0)
        return RecordedSessions(
            trace, self.source, self.think.build() if isinstance(self.think, PauseSpec) else self.think, speed,
            block_tokens=self.block_tokens, max_pause=self.max_pause or math.inf, shuffle=self.shuffle,
            max_model_len=self.max_model_len, advance=(low, high), **others,
        )  # fmt: skip


SessionsSpec = Annotated[DrawnSessionsSpec | RecordedSessionsSpec, Field(discriminator="source")]
