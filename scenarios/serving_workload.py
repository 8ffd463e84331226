"""The `workload` section of a serving scenario."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.admission_control import RetriesSpec
from scenarios.lengths import LengthSpec, TraceSpec, UniformLengths
from scenarios.limits import (
    PREFIX_IDS,
    BlockTokens,
    Clients,
    Models,
    PositiveTokens,
    PrefixGroups,
    Requests,
)
from scenarios.scheduling import ServiceClassSpec
from scenarios.sessions import DrawnSessionsSpec, RecordedSessionsSpec, SessionsSpec
from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.lengths import Lengths
from workloads.mixes import ModelMix, TaskMix, TaskShare, zipf_weights
from workloads.pairs import Independent, LengthPairs
from workloads.pauses import SMALLEST_CV, Pauses
from workloads.prefixes import REMEMBERED_RUBRICS, SharedPrefixes
from workloads.rates import Bursts, Profile, Varying
from workloads.recorded_sessions import RecordedSessions
from workloads.sessions import DrawnSessions
from workloads.traces import Trace


class ClosedLoopSpec(Strict):
    """A closed loop: each of `concurrency` clients sends its next request `think` seconds after its last answer.

    `think_cv`: coefficient of variation of those seconds, gamma-distributed. With 0 they never vary, and clients that
    are answered together stay in step.
    """

    process: Literal["closed_loop"]
    concurrency: Clients
    think: NonNegativeFloat = 0.0
    think_cv: float = Field(default=0.0, ge=0, le=100)

    @model_validator(mode="after")
    def _can_vary(self) -> ClosedLoopSpec:
        if 0 < self.think_cv < SMALLEST_CV:
            raise ValueError(f"think_cv: expected 0, or at least {SMALLEST_CV}")
        return self

    def pauses(self, rng: np.random.Generator) -> Callable[[], float]:
        """A function that draws the seconds between an answer and a client's next request."""
        return Pauses(self.think, self.think_cv).stream(rng)


class ProfileSpec(Strict):
    """A rate that changes over time and repeats; only its shape counts, since `rate` is its mean.

    Attributes:
        points: [seconds, relative rate]; the time of the last one is the period. between: straight lines (`ramps`) or
            constant rates (`steps`) between them.
        swing, peak_at, period: in place of points, a sine wave between 1 - swing and 1 + swing; seconds.
        start: seconds into the profile at time 0, or `random`.
    """

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
        """The profile."""
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
        """The bursts."""
        return Bursts(self.factor, self.seconds, self.every)


class OpenLoopSpec(Strict):
    """Open arrivals of `rate` requests a second, independent of answers; `cv` is the gaps' variation under gamma.

    With a `profile` or `bursts` the rate changes over time, and `rate` is its mean.
    """

    process: Literal["poisson", "gamma", "deterministic"]
    rate: PositiveFloat
    cv: PositiveFloat = 1.0
    profile: ProfileSpec | None = None
    bursts: BurstsSpec | None = None

    def build(self) -> Arrivals:
        """The arrival process."""
        constant = self._constant()
        if self.profile is None and self.bursts is None:
            return constant
        start = 0.0 if self.profile is None else self.profile.start
        return Varying(
            constant,
            None if self.profile is None else self.profile.build(),
            None if self.bursts is None else self.bursts.build(),
            None if start == "random" else start,
        )

    def _constant(self) -> Poisson | Gamma | Deterministic:
        match self.process:
            case "poisson":
                return Poisson(self.rate)
            case "gamma":
                return Gamma(self.rate, self.cv)
            case _:
                return Deterministic(self.rate)


class ReplaySpec(Strict):
    """The trace's own arrivals. `speed` 2 plays it twice as fast."""

    process: Literal["replay"]
    speed: PositiveFloat = 1.0


class ModelsSpec(Strict):
    """`count` models named model-0, model-1, …, in order of popularity: p_i ∝ i^-zipf (0 is uniform; SUN A.2)."""

    count: Models = 1
    zipf: float = Field(default=0.0, ge=0)

    @property
    def names(self) -> list[str]:
        """The models."""
        return [f"model-{i}" for i in range(self.count)]

    @property
    def shares(self) -> dict[str, float]:
        """The share of each model in all requests; a single one is called default."""
        names = self.names if self.count > 1 else ["default"]
        return dict(zip(names, zipf_weights(self.count, self.zipf).tolist(), strict=True))


class PrefixesSpec(Strict):
    """Prompts that begin alike: `groups` rubrics of `tokens` tokens, of Zipf popularity. See `SharedPrefixes`."""

    groups: PrefixGroups
    tokens: PositiveTokens
    block_tokens: BlockTokens = 16
    zipf: float = Field(default=0.0, ge=0)
    cache_suffix: bool = False

    @model_validator(mode="after")
    def _ids_fit(self) -> PrefixesSpec:
        rubric = self.tokens // self.block_tokens
        total = rubric * min(self.groups, REMEMBERED_RUBRICS)
        if total > PREFIX_IDS.most:
            raise BadInput(
                f"{PREFIX_IDS.expectation(total)}; a rubric has {rubric:,}", field="tokens", value=self.tokens
            )
        return self


def _check_prompt_ids(tokens: float, prefixes: PrefixesSpec) -> None:
    """Refuse prompts with too many ids: with `cache_suffix`, every block of a prompt has one."""
    ids = int(tokens) // prefixes.block_tokens
    if ids > PREFIX_IDS.most:
        expected = f"{PREFIX_IDS.expectation(ids)}; a prompt of {tokens:g} tokens has {ids:,}"
        raise BadInput(expected, field="prefixes.block_tokens", value=prefixes.block_tokens)


class TaskSpec(Strict):
    """A kind of request: its share by `weight`, its prompts, and its answers where it has any.

    Attributes:
        priority: smaller goes first; with a `service_class`, that of the class. tenant: whose requests these are.
    """

    task: Literal["generate", "classify", "embed", "score", "rerank", "prompt_logprobs"]
    weight: PositiveFloat
    prefill: LengthSpec
    decode: LengthSpec | None = None
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
    """Clients with a part of the requests, by `weight`. All have requests of the same lengths.

    Attributes:
        tenant, service_class, priority: as in `TaskSpec`.
    """

    weight: PositiveFloat = 1.0
    tenant: str = ""
    service_class: str | None = None
    priority: int = 0


def _share(
    spec: TaskSpec | ClientSpec, task: str, lengths: LengthPairs | Lengths, classes: Mapping[str, ServiceClassSpec]
) -> TaskShare:
    """The share of a mix, given the classes by name."""
    if spec.service_class is None:
        return TaskShare(task, spec.weight, lengths, spec.priority, spec.tenant)
    contract = classes[spec.service_class]
    goal = math.inf if contract.ttft is None else contract.ttft
    return TaskShare(task, spec.weight, lengths, contract.priority, spec.tenant, spec.service_class, goal)


class ServingWorkloadSpec(Strict):
    """The workload of a serving scenario.

    Attributes:
        requests: their number; by default that of the trace.
        prefill, decode: lengths of prompts and answers, or `tasks` with lengths of their own, or a `trace`.
        clients: tenants and classes of requests that have the same lengths; `tasks` have theirs of their own.
        service_classes: priorities and goals that `tasks` and `clients` name.
        sessions: requests in turns. Arrivals are then those of sessions, and `concurrency` is the number of users.
        max_tokens: the limit that clients set; left out, each request's limit is the length of its own answer.
        retries: what clients do with a request that is shed; left out, they give up.
    """

    requests: Requests | None = None
    prefill: LengthSpec | None = None
    decode: LengthSpec | None = None
    tasks: Annotated[list[TaskSpec], Field(min_length=1)] | None = None
    clients: list[ClientSpec] = Field(default_factory=list)
    service_classes: dict[str, ServiceClassSpec] = Field(default_factory=dict)
    trace: TraceSpec | None = None
    arrivals: Annotated[ClosedLoopSpec | OpenLoopSpec | ReplaySpec, Field(discriminator="process")]
    models: ModelsSpec = Field(default_factory=ModelsSpec)
    prefixes: PrefixesSpec | None = None
    sessions: SessionsSpec | None = None
    max_tokens: PositiveTokens | None = None
    retries: RetriesSpec | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ServingWorkloadSpec:
        given = [self.prefill is not None and self.decode is not None, self.tasks is not None, self.trace is not None]
        if sum(given) != 1:
            raise ValueError("expected prefill and decode, or tasks, or a trace: one of the three")
        if self.trace is None and self.requests is None:
            raise ValueError("expected requests, the number of them, since there is no trace to count")
        if isinstance(self.sessions, DrawnSessionsSpec) and (self.prefill is None or self.decode is None):
            expected = "expected session_ids or prefix_ids with a trace, and no sessions with tasks"
            raise BadInput(expected, field="sessions.source", value=self.sessions.source)
        if isinstance(self.sessions, RecordedSessionsSpec):
            self._check_recorded(self.sessions)
        if self.arrivals.process == "replay" and (self.trace is None or self.trace.pairing != "joint"):
            raise ValueError("arrivals.process replay expects a trace, of pairing joint")
        if self.prefixes is not None and self.prefixes.cache_suffix:
            for spec in (*([self.prefill] if self.prefill else []), *(task.prefill for task in self.tasks or [])):
                _check_prompt_ids(spec.high if isinstance(spec, UniformLengths) else spec.mean, self.prefixes)
        return self

    @model_validator(mode="after")
    def _classes_are_there(self) -> ServingWorkloadSpec:
        given: list[tuple[str, TaskSpec | ClientSpec]] = [
            *((f"tasks.{i}", task) for i, task in enumerate(self.tasks or [])),
            *((f"clients.{i}", client) for i, client in enumerate(self.clients)),
        ]
        for field, each in given:
            name = each.service_class
            if name is None:
                continue
            if name not in self.service_classes:
                expected = f"expected one of workload.service_classes ({', '.join(self.service_classes) or 'none'})"
                raise BadInput(expected, field=f"{field}.service_class", value=name)
            if each.priority:
                expected = f"expected none: that of service_classes.{name} holds"
                raise BadInput(expected, field=f"{field}.priority", value=each.priority)
        return self

    @model_validator(mode="after")
    def _clients_of_single_requests(self) -> ServingWorkloadSpec:
        if self.clients and (self.tasks is not None or self.sessions is not None):
            raise BadInput("expected none with tasks, which name them, or sessions", field="clients")
        if self.clients and self.arrivals.process == "replay":
            raise BadInput("expected none with the arrivals of a trace", field="clients")
        return self

    def read_trace(self, base: Path) -> Trace | None:
        """The trace, if there is one; relative paths start from `base`."""
        return None if self.trace is None else self.trace.read(base)

    def _check_recorded(self, spec: RecordedSessionsSpec) -> None:
        if self.trace is None or self.trace.pairing != "joint":
            raise BadInput(
                "expected drawn without a trace of pairing joint", field="sessions.source", value=spec.source
            )
        if self.prefixes is not None:
            raise BadInput("expected none with the sessions of a trace", field="prefixes")
        if (self.arrivals.process == "replay") != (spec.think is None):
            expected = "expected replay for turns at their recorded times, and sessions.think with any other process"
            raise BadInput(expected, field="arrivals.process", value=self.arrivals.process)

    def build(self, trace: Trace | None) -> Workload | DrawnSessions | RecordedSessions:
        """The workload.

        Raises:
            BadInput: replay of a trace without times, or prefixes beside those of a trace.
        """
        models = None if self.models.count == 1 else ModelMix.zipf(self.models.names, self.models.zipf)
        if trace is not None and self.prefixes is not None and self.prefixes.cache_suffix:
            _check_prompt_ids(int(trace.prefill_tokens.max()), self.prefixes)
        prefixes = SharedPrefixes(**self.prefixes.model_dump()) if self.prefixes else None
        arrivals = self.arrivals
        if isinstance(self.sessions, RecordedSessionsSpec):
            assert trace is not None
            return self._recorded_sessions(self.sessions, trace, models)
        if isinstance(arrivals, ReplaySpec):
            assert trace is not None
            return Workload.replay(
                trace, speed=arrivals.speed, models=models, prefixes=prefixes, max_tokens=self.max_tokens
            )
        process: Arrivals = ClosedLoop() if isinstance(arrivals, ClosedLoopSpec) else arrivals.build()
        if self.sessions is not None:
            return self._drawn_sessions(self.sessions, process, models, prefixes)
        return Workload(self._content(trace), process, models, prefixes, self.max_tokens)

    def _drawn_sessions(
        self, spec: DrawnSessionsSpec, arrivals: Arrivals, models: ModelMix | None, prefixes: SharedPrefixes | None
    ) -> DrawnSessions:
        assert self.prefill is not None
        assert self.decode is not None
        return DrawnSessions(
            turns=spec.turns.build(),
            first=self.prefill.build(),
            growth=spec.growth.build(),
            answers=self.decode.build(),
            think=spec.think.build(),
            tools=spec.tools.build() if spec.tools else None,
            branches=spec.branches.build() if spec.branches else None,
            arrivals=arrivals,
            models=models,
            prefixes=prefixes,
            max_tokens=self.max_tokens,
            max_model_len=spec.max_model_len,
            block_tokens=spec.block_tokens,
        )

    def _recorded_sessions(self, spec: RecordedSessionsSpec, trace: Trace, models: ModelMix | None) -> RecordedSessions:
        arrivals: Arrivals = self.arrivals.build() if isinstance(self.arrivals, OpenLoopSpec) else ClosedLoop()
        return RecordedSessions(
            trace,
            spec.source,
            think=spec.think.build() if spec.think else None,
            speed=self.arrivals.speed if isinstance(self.arrivals, ReplaySpec) else 1.0,
            arrivals=arrivals,
            models=models,
            max_tokens=self.max_tokens,
            block_tokens=spec.block_tokens,
        )

    def count(self, trace: Trace | None) -> int:
        """Number of requests."""
        if self.requests is not None:
            return self.requests
        assert trace is not None
        return len(trace)

    def _content(self, trace: Trace | None) -> LengthPairs | TaskMix | Trace:
        """The content of the requests, spread over clients where there are some.

        Raises:
            BadInput: clients of a trace whose rows come in order.
        """
        content = self._content_of_all(trace)
        if not self.clients:
            return content
        if isinstance(content, Trace):
            raise BadInput("expected none with a trace that has prefix ids", field="workload.clients")
        assert not isinstance(content, TaskMix), "tasks have clients of their own"
        return TaskMix([_share(client, "generate", content, self.service_classes) for client in self.clients])

    def _content_of_all(self, trace: Trace | None) -> LengthPairs | TaskMix | Trace:
        """The content of the requests. Rows of a trace are drawn with replacement, unless they have prefix ids.

        Rows with prefix ids come once and in order: a repeated prompt would be found in the prefix cache.
        """
        if trace is not None and self.trace is not None:
            if self.trace.pairing == "independent":
                return trace.pairs().independent()
            return trace.pairs() if trace.prefix_blocks is None else trace
        if self.tasks is not None:
            return TaskMix([spec.build(self.service_classes) for spec in self.tasks])
        assert self.prefill is not None
        assert self.decode is not None
        return Independent(self.prefill.build(), self.decode.build())
