"""Scenario files of serving systems, `kind: serving`, and their workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveFloat, model_validator

from latency_models.io.config_io import Strict, late_section, late_sections
from latency_models.sources.registry import StepTimeSpec
from scenarios import fields
from scenarios.engine import EngineSpec, PoolSpec, fill_pools
from scenarios.reading import ScenarioFile, Settings, check
from scenarios.system import AnySystemSpec, ColocatedSpec, FailureSpec
from workloads.arrivals import (
    LONGEST,
    SMALLEST_CV,
    Arrivals,
    ClosedLoop,
    Deterministic,
    Gamma,
    Pauses,
    Poisson,
    Steady,
    Varying,
)
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.lengths import Lengths
from workloads.mixes import ModelMix, TaskMix, zipf_weights
from workloads.pairs import Independent, LengthPairs
from workloads.trace import Trace

if TYPE_CHECKING:
    from scenarios.overload import RetriesSpec
    from scenarios.planning import PlanSpec
    from scenarios.requests import (
        BurstsSpec,
        ClientSpec,
        PrefixesSpec,
        ProfileSpec,
        ServiceClassSpec,
        SessionsSpec,
        TaskSpec,
        TraceSpec,
    )
    from workloads.mixes import SharedPrefixes
    from workloads.recorded_sessions import RecordedSessions
    from workloads.sessions import DrawnSessions
else:
    PlanSpec = late_section("scenarios.planning", "PlanSpec")
    RetriesSpec = late_section("scenarios.overload", "RetriesSpec")
    BurstsSpec, ProfileSpec, SessionsSpec, TraceSpec = late_sections(
        "scenarios.requests", "BurstsSpec", "ProfileSpec", "SessionsSpec", "TraceSpec"
    )
    ClientSpec, PrefixesSpec, ServiceClassSpec, TaskSpec = late_sections(
        "scenarios.requests", "ClientSpec", "PrefixesSpec", "ServiceClassSpec", "TaskSpec"
    )


HIT_RATE_SAMPLE = 4000
"""Prompts by whose lengths a common beginning is sized."""


class ClosedLoopSpec(Strict):
    """A closed loop: each of `concurrency` clients sends its next request `think` seconds after its last answer.

    These are gamma-distributed; with `think_cv` 0, clients that are answered together stay in step.
    """

    process: Literal["closed_loop"]
    concurrency: fields.Clients
    think: Annotated[float, Field(ge=0, le=LONGEST)] = 0.0
    think_cv: float = Field(default=0.0, ge=0, le=100)
    duration: PositiveFloat | None = None

    @model_validator(mode="after")
    def _can_vary(self) -> ClosedLoopSpec:
        if 0 < self.think_cv < SMALLEST_CV:
            raise ValueError(f"think_cv: expected 0, or at least {SMALLEST_CV}")
        return self

    def pauses(self, rng: np.random.Generator) -> Callable[[], float]:
        """A function that draws the seconds between an answer and a client's next request."""
        return Pauses(self.think, self.think_cv).stream(rng)


class OpenLoopSpec(Strict):
    """Open arrivals of `rate` requests a second in the mean, independent of answers; `cv`: of gamma's gaps."""

    process: Literal["poisson", "gamma", "deterministic"]
    rate: PositiveFloat
    cv: PositiveFloat = 1.0
    profile: ProfileSpec | None = None
    bursts: BurstsSpec | None = None

    @model_validator(mode="after")
    def _can_be(self) -> OpenLoopSpec:
        CONSTANT[self.process](self.rate, self.cv)
        return self

    def build(self) -> Arrivals:
        constant = CONSTANT[self.process](self.rate, self.cv)
        if self.profile is None and self.bursts is None:
            return constant
        start = 0.0 if self.profile is None else self.profile.start
        return Varying(
            constant,
            None if self.profile is None else self.profile.build(),
            None if self.bursts is None else self.bursts.build(),
            None if start == "random" else start,
        )


CONSTANT: dict[str, Callable[[float, float], Steady]] = {
    "poisson": lambda rate, cv: Poisson(rate),
    "gamma": Gamma,
    "deterministic": lambda rate, cv: Deterministic(rate),
}
"""Processes of constant rate by name, of a rate and a coefficient of variation."""


class ReplaySpec(Strict):
    """The trace's own arrivals. `speed` 2 plays it twice as fast."""

    process: Literal["replay"]
    speed: PositiveFloat = 1.0


class ModelsSpec(Strict):
    """`count` models named model-0, model-1, …, in order of popularity: p_i ∝ i^-zipf (0 is uniform; SUN A.2)."""

    count: fields.Models = 1
    zipf: float = Field(default=0.0, ge=0)

    @property
    def names(self) -> list[str]:
        """The models that requests are for; a single one is called default."""
        return [f"model-{i}" for i in range(self.count)] if self.count > 1 else ["default"]

    @property
    def shares(self) -> dict[str, float]:
        """The share of each model in all requests."""
        weights = zipf_weights(self.count, self.zipf).tolist() if self.count > 1 else [1.0]
        return dict(zip(self.names, weights, strict=True))


class ServingWorkloadSpec(Strict):
    """The workload of a serving scenario; docs/reference/serving-scenario.md describes every field."""

    requests: fields.Requests | None = None
    prefill: fields.LengthSpec | None = None
    decode: fields.LengthSpec | None = None
    tasks: Annotated[list[TaskSpec], Field(min_length=1)] | None = None
    clients: list[ClientSpec] = Field(default_factory=list)
    service_classes: dict[str, ServiceClassSpec] = Field(default_factory=dict)
    trace: TraceSpec | None = None
    arrivals: Annotated[ClosedLoopSpec | OpenLoopSpec | ReplaySpec, Field(discriminator="process")]
    models: ModelsSpec = Field(default_factory=ModelsSpec)
    prefixes: PrefixesSpec | None = None
    hit_rate: float | None = Field(default=None, ge=0, lt=1)
    sessions: SessionsSpec | None = None
    max_tokens: fields.PositiveTokens | None = None
    retries: RetriesSpec | None = None

    @model_validator(mode="after")
    def _agrees(self) -> ServingWorkloadSpec:
        sessions, joint = self.sessions, self.trace is not None and self.trace.pairing == "joint"
        has_lengths, process = self.prefill is not None and self.decode is not None, self.arrivals.process
        source, duration = getattr(sessions, "source", None), getattr(self.arrivals, "duration", None)
        replays, recorded = process == "replay", source not in (None, "drawn")
        paused = getattr(sessions, "think", None) is not None
        elsewhere = self.tasks is not None or sessions is not None
        fields.refuse_first([
            (has_lengths + (self.tasks is not None) + (self.trace is not None) != 1, None, None,
             "expected prefill and decode, or tasks, or a trace: one of the three"),
            (self.trace is None and self.requests is None, None, None,
             "expected requests, the number of them, since there is no trace to count"),
            (duration is not None and sessions is None, "arrivals.duration", duration,
             "expected none without workload.sessions"),
            (source == "drawn" and not has_lengths, "sessions.source", source,
             "expected session_ids or prefix_ids with a trace, and no sessions with tasks"),
            (recorded and not joint, "sessions.source", source, "expected drawn without a trace of pairing joint"),
            (recorded and self.prefixes is not None, "prefixes", None, "expected none with the sessions of a trace"),
            (recorded and replays == paused, "arrivals.process", process,
             "expected replay for turns at their recorded times, and sessions.think with any other process"),
            (replays and not joint, None, None, "arrivals.process replay expects a trace, of pairing joint"),
            (self.hit_rate is not None and (self.prefixes is not None or sessions is not None), "hit_rate",
             self.hit_rate, "expected none beside prefixes or sessions, from which hits follow"),
            (self.clients and elsewhere, "clients", None, "expected none with tasks, which name them, or sessions"),
            (self.clients and replays, "clients", None, "expected none with the arrivals of a trace"),
        ])  # fmt: skip
        return self

    @model_validator(mode="after")
    def _fits(self) -> ServingWorkloadSpec:
        if self.sessions is not None and self.sessions.source == "drawn":
            assert self.prefill is not None
            assert self.decode is not None
            self.sessions.check_blocks(self.requests or 1, self.prefill, self.decode)
        if self.prefixes is not None:
            for prompt in (*([self.prefill] if self.prefill else []), *(task.prefill for task in self.tasks or [])):
                longest = prompt.high if isinstance(prompt, fields.UniformLengths) else prompt.mean
                mean = (prompt.low + prompt.high) / 2 if isinstance(prompt, fields.UniformLengths) else prompt.mean
                self.prefixes.check_prompts(longest, mean)
        names = ", ".join(self.service_classes) or "none"
        sections: dict[str, Sequence[TaskSpec | ClientSpec]] = {"tasks": self.tasks or [], "clients": self.clients}
        for section, specs in sections.items():
            for i, spec in enumerate(specs):
                name = spec.service_class
                fields.refuse_first([
                    (name is not None and name not in self.service_classes, f"{section}.{i}.service_class", name,
                     f"expected one of workload.service_classes ({names})"),
                    (name is not None and spec.priority, f"{section}.{i}.priority", spec.priority,
                     f"expected none: that of service_classes.{name} holds"),
                ])  # fmt: skip
        return self

    def read_trace(self, base: Path) -> Trace | None:
        """The trace, if there is one; relative paths start from `base`."""
        return None if self.trace is None else self.trace.read(base)

    def build(self, trace: Trace | None) -> Workload | DrawnSessions | RecordedSessions:
        models = None if self.models.count == 1 else ModelMix.zipf(self.models.names, self.models.zipf)
        if trace is not None and self.prefixes is not None:
            self.prefixes.check_prompts(int(trace.prefill_tokens.max()), float(trace.prefill_tokens.mean()))
        trace, prefixes = self._sharing(trace)
        arrivals, limit = self.arrivals, self.max_tokens
        speed = arrivals.speed if isinstance(arrivals, ReplaySpec) else 1.0
        process: Arrivals = arrivals.build() if isinstance(arrivals, OpenLoopSpec) else ClosedLoop()
        if self.sessions is not None and self.sessions.source != "drawn":
            assert trace is not None
            return self.sessions.build(trace, speed, arrivals=process, models=models, max_tokens=limit)
        if isinstance(arrivals, ReplaySpec):
            assert trace is not None
            return Workload.replay(trace, speed=speed, models=models, prefixes=prefixes, max_tokens=limit)
        if self.sessions is not None:
            shared: dict[str, Any] = {"arrivals": process, "models": models, "prefixes": prefixes, "max_tokens": limit}
            return self.sessions.build(*self._lengths(), **shared)
        return Workload(self._content(trace), process, models, prefixes, limit)

    def _lengths(self) -> tuple[Lengths, Lengths]:
        assert self.prefill is not None
        assert self.decode is not None
        return self.prefill.build(), self.decode.build()

    def _sharing(self, trace: Trace | None) -> tuple[Trace | None, SharedPrefixes | None]:
        """The trace and the common beginnings of prompts, such that caches supply `hit_rate` where it is stated."""
        if self.hit_rate is None:
            return trace, self.prefixes.build() if self.prefixes else None
        from workloads.trace import common_beginning, thinned

        if trace is not None:
            if trace.prefix_blocks is not None:
                return thinned(trace, self.hit_rate), None
            return trace, common_beginning(trace.prefill_tokens, self.hit_rate)
        requests = Workload(self._content(None)).requests(np.random.default_rng(0), HIT_RATE_SAMPLE)
        return None, common_beginning(np.array([request.prompt_tokens for request, _ in requests]), self.hit_rate)

    def count(self, trace: Trace | None) -> int:
        """Number of requests."""
        if self.requests is not None:
            return self.requests
        assert trace is not None
        return len(trace)

    def _content(self, trace: Trace | None) -> LengthPairs | TaskMix | Trace:
        """The content of the requests, spread over clients where there are some.

        Rows of a trace are drawn with replacement, unless they have prefix ids: those come once and in order, since a
        repeated prompt would be found in the prefix cache.
        """
        if self.tasks is not None:  # they have clients of their own
            return TaskMix([spec.build(self.service_classes) for spec in self.tasks])
        content: LengthPairs | Trace
        if trace is None or self.trace is None:
            content = Independent(*self._lengths())
        elif self.trace.pairing == "independent":
            content = trace.pairs().independent()
        else:
            content = trace.pairs() if trace.prefix_blocks is None else trace
        if not self.clients:
            return content
        if isinstance(content, Trace):
            raise BadInput("expected none with a trace that has prefix ids", field="workload.clients")
        return TaskMix([client.build(content, self.service_classes) for client in self.clients])


class ServingScenario(ScenarioFile):
    """A serving system and its workload; docs/reference/serving-scenario.md describes every field."""

    kind: Literal["serving"]
    workload: ServingWorkloadSpec
    engine: EngineSpec
    step_time: StepTimeSpec
    system: AnySystemSpec = Field(default_factory=ColocatedSpec)
    failures: list[FailureSpec] = Field(default_factory=list)
    measure: fields.MeasureSpec = Field(default_factory=fields.MeasureSpec)
    measured: fields.MeasuredSpec | None = None
    plan: PlanSpec | None = Field(default=None, exclude=True)
    fast_forward: bool = True
    detail: bool | Literal["requests"] = True

    @model_validator(mode="before")
    @classmethod
    def _fill_pools(cls, document: Any) -> Any:
        return fill_pools(document)

    @model_validator(mode="after")
    def _pools_agree(self) -> ServingScenario:
        models, classes = set(self.workload.models.names), self.workload.service_classes
        first_names = ", ".join(sorted(models)[:10])
        unserved = {"prefill": set(models), "decode": set(models)}
        for i, pool in enumerate(self.pools):
            served = set(pool.models) if isinstance(pool.models, list) else models
            for side in ("prefill", "decode") if pool.role == "both" else (pool.role,):
                unserved[side] -= served
            control, ranks = pool.engine.admission_control, pool.engine.data_parallel_size
            section, strange_models = self.system.section(i, "engine"), sorted(served - models)
            strange_classes = [name for name in control.classes if name not in classes] if control else []
            fields.refuse_first([
                (strange_models, self.system.section(i, "models"), next(iter(strange_models), None),
                 f"expected models of the workload ({first_names})"),
                (control and self.workload.sessions, f"{section}.admission_control", None,
                 "expected none: a turn of a session needs the answer before it"),
                (strange_classes, f"{section}.admission_control.classes", next(iter(strange_classes), None),
                 f"expected names of workload.service_classes ({', '.join(classes) or 'none'})"),
                (self.system.kv_events and ranks > 1, f"{section}.data_parallel_size", ranks,
                 "expected 1, since system.kv_events tells of one cache an engine"),
            ])  # fmt: skip
        fields.refuse_first(
            (missing, "system.pools", None, f"expected a pool that serves {min(missing)}, for {side}")
            for side, missing in unserved.items() if missing
        )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _engines_in_all(self) -> ServingScenario:
        models, pools = self.workload.models.count, self.pools
        total = sum(pool.num_engines(models) * pool.engine.data_parallel_size for pool in pools)
        if total > fields.ENGINES.maximum:
            apart = sum(pool.replicas for pool in pools if pool.models == "each")
            shared = sum(pool.replicas for pool in pools if pool.models != "each")
            ranks = max(pool.engine.data_parallel_size for pool in pools)
            sizes = f"found {models:,} models, {apart:,} engines of each, {shared:,} shared, {ranks:,} ranks an engine"
            raise BadInput(f"{fields.ENGINES.expectation(total)}; {sizes}", value=total, field="system")
        nodes = None if isinstance(self.system.routing, str) else self.system.routing.virtual_nodes
        if (places := total * (nodes or 0)) > fields.RING_PLACES.maximum:
            raise BadInput(fields.RING_PLACES.expectation(places), value=places, field="system.routing")
        return self

    @model_validator(mode="after")
    def _autoscaled_pools(self) -> ServingScenario:
        if not self.system.autoscaling:
            return self
        arrivals, pools = self.workload.arrivals, {pool.name: pool for pool in self._expanded()}
        duration, rate = getattr(arrivals, "duration", None), getattr(arrivals, "rate", None)
        seconds = (self.workload.requests or 0) / rate if rate else 0.0
        expected = "expected none with autoscaling, which ends with the last of a number of requests"
        fields.refuse_first([(duration is not None, "workload.arrivals.duration", duration, expected)])
        for name, spec in self.system.autoscaling.items():
            field, low, high = f"system.autoscaling.{name}", spec.min_replicas, spec.max_replicas
            if name not in pools:
                raise BadInput(f"expected a pool: {', '.join(pools)}", field=field)
            role, replicas, decisions = pools[name].role, pools[name].replicas, int(seconds / spec.sync_period)
            metrics = {"prefill": ("ttft",), "decode": ("tpot",), "both": ("ttft", "tpot", "e2e")}[role]
            fields.refuse_first([
                (not low <= replicas <= high, field, replicas,
                 f"expected the pool to begin with {low} to {high} replicas"),
                (decisions > fields.DECISIONS.maximum, "workload.arrivals.rate", rate,
                 f"{fields.DECISIONS.expectation(decisions)}: at this rate, the requests take {seconds:.2g} s"),
                *((goal.metric not in metrics, f"{field}.goals", goal.name,
                   f"expected goals of {' and '.join(metrics)} for engines of role {role}")
                  for goal in spec.latency_goals),
            ])  # fmt: skip
        return self

    @cached_property
    def pools(self) -> list[PoolSpec]:
        """The pools, those that prefill first, in every form of `system`; an autoscaled one with its maximum."""
        pools, scaled = self._expanded(), self.system.autoscaling or {}
        return [
            pool.model_copy(update={"replicas": scaled[pool.name].max_replicas}) if pool.name in scaled else pool
            for pool in pools
        ]

    def _expanded(self) -> list[PoolSpec]:
        return self.system.expand_for(self.workload.models.shares, self.engine, self.step_time)


def check_scenario(document: dict[str, Any], settings: Settings, path: Path) -> ServingScenario:
    """Apply `settings` to a document, and check it."""
    return check(ServingScenario, document, settings, path)
