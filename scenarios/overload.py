"""Sections for overload: `engine.admission_control`, `workload.retries` and `system.autoscaling`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict
from scenarios.fields import Engines, Goal, PolicySpec, Requests, make_policy, read_goals, registered
from schedulers.admission_control import AdmissionLimits, WaitingLimits
from schedulers.autoscaling import SCALING_POLICIES, Autoscaler, Predict, RatePolicy, ScalingRules
from workloads.errors import BadInput


class ClassLimitsSpec(Strict):
    """The most requests and prompt tokens of a class that may wait for their first step. Default: any number."""

    max_waiting: PositiveInt | None = None
    max_waiting_tokens: PositiveInt | None = None

    @property
    def limits(self) -> WaitingLimits:
        """The scheduler's settings."""
        return WaitingLimits(self.max_waiting or 0, self.max_waiting_tokens or 0)


class AdmissionControlSpec(ClassLimitsSpec):
    """The requests that an engine sheds. All limits are for one engine."""

    max_waiting_per_tenant: PositiveInt | None = None
    predicted_ttft: PositiveFloat | None = None
    classes: dict[str, ClassLimitsSpec] = Field(default_factory=dict)

    def build(self) -> AdmissionLimits:
        classes = tuple((name, spec.limits) for name, spec in self.classes.items())
        predicted_ttft = math.inf if self.predicted_ttft is None else self.predicted_ttft
        return AdmissionLimits(self.limits, classes, self.max_waiting_per_tenant or 0, predicted_ttft)


class RetriesSpec(Strict):
    """Clients send a shed request again, `attempts` times at most, after `Retry-After` times 1 to 1 + `jitter`."""

    attempts: PositiveInt
    jitter: NonNegativeFloat = 0.5


SHORTEST_PERIOD = 0.05
"""Shortest time between decisions, seconds. They are made as long as a simulation lasts."""


class RatePolicySpec(Strict):
    """At most `value` engines, or percent of the engines, are added or removed in `period` seconds."""

    type: Literal["engines", "percent"]
    value: PositiveFloat
    period: PositiveFloat = 15.0


class ScalingRulesSpec(Strict):
    """The rules of adding or of removing engines; defaults are those of Kubernetes (`schedulers.autoscaling`)."""

    default_policies: ClassVar[tuple[RatePolicy, ...]] = ()

    stabilization_window: NonNegativeFloat = 0.0
    policies: list[RatePolicySpec] | None = None
    select: Literal["max", "min", "disabled"] = "max"

    def build(self) -> ScalingRules:
        policies = self.default_policies
        if self.policies is not None:
            policies = tuple(RatePolicy(policy.type, policy.value, policy.period) for policy in self.policies)
        return ScalingRules(self.stabilization_window, policies, self.select)


class ScaleUpSpec(ScalingRulesSpec):
    """The rules of adding engines."""

    default_policies = (RatePolicy("engines", 4, 15.0), RatePolicy("percent", 100, 15.0))


class ScaleDownSpec(ScalingRulesSpec):
    """The rules of removing engines."""

    default_policies = (RatePolicy("percent", 100, 15.0),)

    stabilization_window: NonNegativeFloat = 300.0


class StartUpSpec(Strict):
    """The start of an engine, in phases, before it takes requests. It is paid for in all of them; seconds."""

    node: NonNegativeFloat = 0.0
    image: NonNegativeFloat = 0.0
    weight_bytes: PositiveFloat | None = None
    bandwidth: PositiveFloat | None = None
    compile: NonNegativeFloat = 0.0
    warm_up: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _both(self) -> StartUpSpec:
        if (self.weight_bytes is None) != (self.bandwidth is None):
            raise ValueError("expected weight_bytes and bandwidth, or neither")
        return self

    @property
    def seconds(self) -> float:
        """The time of all of it."""
        loading = 0.0 if self.weight_bytes is None or self.bandwidth is None else self.weight_bytes / self.bandwidth
        return self.node + self.image + loading + self.compile + self.warm_up


class AutoscalingSpec(PolicySpec):
    """The autoscaling of one pool; docs/reference/serving-scenario.md says which policy has which field."""

    policy: Annotated[str, registered(SCALING_POLICIES)]
    min_replicas: Engines = 1
    max_replicas: Engines
    sync_period: Annotated[float, Field(ge=SHORTEST_PERIOD)] = 15.0
    start_up: StartUpSpec = Field(default_factory=StartUpSpec)
    scale_up: ScaleUpSpec | None = None
    scale_down: ScaleDownSpec | None = None
    target: PositiveFloat | None = None
    metric: Literal["busy", "load", "kv_used", "running", "waiting"] | None = None
    tolerance: NonNegativeFloat | None = None
    count: Literal["waiting", "unfinished"] | None = None
    schedule: list[Annotated[list[float], Field(min_length=2, max_length=2)]] | None = None
    period: PositiveFloat | None = None
    goals: dict[str, float | str] | None = None
    margin: Annotated[float, Field(ge=0, lt=1)] | None = None
    window: PositiveFloat = 300.0
    forecast: Literal["constant", "linear"] = "constant"
    max_requests: Annotated[Requests, Field(ge=1)] = 1000

    @model_validator(mode="after")
    def _can_be_built(self) -> AutoscalingSpec:
        if self.min_replicas > self.max_replicas:
            expected = f"expected at least min_replicas, {self.min_replicas}"
            raise BadInput(expected, field="max_replicas", value=self.max_replicas)
        for goal in self.latency_goals:
            if not goal.at_most or goal.of is not None or goal.metric == "itl":
                expected = "expected ttft, tpot or e2e with a statistic, such as ttft_p99"
                raise BadInput(expected, field="goals", value=goal.name)
        self.build(lambda engines: {})
        return self

    @property
    def latency_goals(self) -> list[Goal]:
        """The goals of the policy, none if it has none."""
        return [] if self.goals is None else read_goals(self.goals)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the policy that the section states, by name."""
        names = ("target", "metric", "tolerance", "count", "schedule", "period", "margin")
        stated = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.goals is not None:
            stated["goals"] = {goal.name: goal.limit for goal in self.latency_goals}
        return stated | (self.model_extra or {})

    def build(self, predict: Predict) -> Autoscaler:
        policy = make_policy(SCALING_POLICIES, self.policy, self.parameters, predict)
        up = None if self.scale_up is None else self.scale_up.build()
        down = None if self.scale_down is None else self.scale_down.build()
        return Autoscaler(policy, self.min_replicas, self.max_replicas, up, down)


Autoscaling = dict[str, AutoscalingSpec]
"""Sections by the names of pools; other pools keep their engines."""


def check_fixed(autoscaling: Autoscaling | None, reason: str, path: Path | None = None) -> None:
    """Refuse autoscaling where the number of engines is fixed."""
    if autoscaling:
        raise BadInput(f"expected none: {reason}", field="system.autoscaling", value=", ".join(autoscaling), file=path)
