"""Scenario files of serving systems: `kind: serving`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from latency_models.io.builtin_files import FilePath
from latency_models.io.config_io import Strict
from latency_models.io.late_section import late_section
from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import EngineSpec
from scenarios.fields import DECISIONS, ENGINES, RING_PLACES
from scenarios.goals import refuse_milliseconds
from scenarios.overrides import Settings
from scenarios.pools import PoolSpec, fill_pools
from scenarios.reading import ScenarioFile, check
from scenarios.serving_workload import ServingWorkloadSpec
from scenarios.system import AnySystemSpec, ColocatedSpec, FailureSpec
from workloads.errors import BadInput


class MeasureSpec(Strict):
    """The measurements; TTFT and E2E begin when a request is `submitted`, or `queued` by the engine between steps."""

    start: Literal["submitted", "queued"] = "submitted"
    after: NonNegativeFloat = 0.0
    before: PositiveFloat | None = None
    prefix_cache: bool = False
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)

    @field_validator("slo")
    @classmethod
    def _in_seconds(cls, slo: dict[str, float]) -> dict[str, float]:
        for name, limit in slo.items():
            refuse_milliseconds(name, limit, f"slo.{name}")
        return slo


class MeasuredSpec(Strict):
    """A real run to set beside the prediction: JSON lines with times of each request. Nothing is fitted to it."""

    requests: FilePath
    timeseries: FilePath | None = None


if TYPE_CHECKING:
    from scenarios.planning import PlanSpec
else:
    PlanSpec = late_section("scenarios.planning", "PlanSpec")


class ServingScenario(ScenarioFile):
    """A serving system and its workload; docs/reference/serving-scenario.md describes every field."""

    kind: Literal["serving"]
    workload: ServingWorkloadSpec
    engine: EngineSpec
    step_time: StepTimeSpec
    system: AnySystemSpec = Field(default_factory=ColocatedSpec)
    failures: list[FailureSpec] = Field(default_factory=list)
    measure: MeasureSpec = Field(default_factory=MeasureSpec)
    measured: MeasuredSpec | None = None
    plan: PlanSpec | None = Field(default=None, exclude=True)
    fast_forward: bool = True
    detail: bool | Literal["requests"] = True

    @model_validator(mode="before")
    @classmethod
    def _fill_pools(cls, document: Any) -> Any:
        return fill_pools(document)

    @model_validator(mode="after")
    def _pools_serve_all_models(self) -> ServingScenario:
        models = set(self.model_names)
        unserved = {"prefill": set(models), "decode": set(models)}
        for i, pool in enumerate(self.pools):
            served = set(pool.models) if isinstance(pool.models, list) else models
            if unknown := served - models:
                expected = f"expected models of the workload ({', '.join(sorted(models)[:10])})"
                raise BadInput(expected, field=self.system.section(i, "models"), value=sorted(unknown)[0])
            for side in ("prefill", "decode") if pool.role == "both" else (pool.role,):
                unserved[side] -= served
        for side, missing in unserved.items():
            if missing:
                expected = f"expected a pool that serves {sorted(missing)[0]}, for {side}"
                raise BadInput(expected, field="system.pools")
        return self

    @model_validator(mode="after")
    def _engines_in_all(self) -> ServingScenario:
        models, pools = self.workload.models.count, self.pools
        total = sum(pool.num_engines(models) * pool.engine.data_parallel_size for pool in pools)
        if total > ENGINES.maximum:
            apart = sum(pool.replicas for pool in pools if pool.models == "each")
            shared = sum(pool.replicas for pool in pools if pool.models != "each")
            ranks = max(pool.engine.data_parallel_size for pool in pools)
            sizes = f"found {models:,} models, {apart:,} engines of each, {shared:,} shared, {ranks:,} ranks an engine"
            raise BadInput(f"{ENGINES.expectation(total)}; {sizes}", value=total, field="system")
        nodes = None if isinstance(self.system.routing, str) else self.system.routing.virtual_nodes
        if (places := total * (nodes or 0)) > RING_PLACES.maximum:
            raise BadInput(RING_PLACES.expectation(places), value=places, field="system.routing")
        return self

    @model_validator(mode="after")
    def _sheds_what_it_may(self) -> ServingScenario:
        for i, pool in enumerate(self.pools):
            control = pool.engine.admission_control
            if control is None:
                continue
            field = f"{self.system.section(i, 'engine')}.admission_control"
            if self.workload.sessions is not None:
                raise BadInput("expected none: a turn of a session needs the answer before it", field=field)
            if unknown := [name for name in control.classes if name not in self.workload.service_classes]:
                names = ", ".join(self.workload.service_classes) or "none"
                expected = f"expected names of workload.service_classes ({names})"
                raise BadInput(expected, field=f"{field}.classes", value=unknown[0])
        return self

    @model_validator(mode="after")
    def _events_of_single_ranks(self) -> ServingScenario:
        for i, pool in enumerate(self.pools):
            if self.system.kv_events is not None and pool.engine.data_parallel_size > 1:
                field = f"{self.system.section(i, 'engine')}.data_parallel_size"
                expected = "expected 1, since system.kv_events tells of one cache an engine"
                raise BadInput(expected, field=field, value=pool.engine.data_parallel_size)
        return self

    @model_validator(mode="after")
    def _autoscaled_pools(self) -> ServingScenario:
        if not self.system.autoscaling:
            return self
        if (duration := getattr(self.workload.arrivals, "duration", None)) is not None:
            expected = "expected none with autoscaling, which ends with the last of a number of requests"
            raise BadInput(expected, field="workload.arrivals.duration", value=duration)
        pools = {pool.name: pool for pool in self._expanded()}
        for name, spec in self.system.autoscaling.items():
            if name not in pools:
                raise BadInput(f"expected a pool: {', '.join(pools)}", field=f"system.autoscaling.{name}")
            pool, field = pools[name], f"system.autoscaling.{name}"
            if not spec.min_replicas <= pool.replicas <= spec.max_replicas:
                expected = f"expected the pool to begin with {spec.min_replicas} to {spec.max_replicas} replicas"
                raise BadInput(expected, field=field, value=pool.replicas)
            rate, requests = getattr(self.workload.arrivals, "rate", None), self.workload.requests
            if rate and requests and (decisions := requests / rate / spec.sync_period) > DECISIONS.maximum:
                expected = f"{DECISIONS.expectation(int(decisions))}: at this rate, the requests take "
                raise BadInput(expected + f"{requests / rate:.2g} s", field="workload.arrivals.rate", value=rate)
            metrics = {"prefill": ("ttft",), "decode": ("tpot",), "both": ("ttft", "tpot", "e2e")}[pool.role]
            for goal in spec.latency_goals:
                if goal.metric not in metrics:
                    expected = f"expected goals of {' and '.join(metrics)} for engines of role {pool.role}"
                    raise BadInput(expected, field=f"{field}.goals", value=goal.name)
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

    @property
    def model_names(self) -> list[str]:
        """The models that requests are for; a single one is called default."""
        return self.workload.models.names if self.workload.models.count > 1 else ["default"]


def check_scenario(document: dict[str, Any], settings: Settings, path: Path) -> ServingScenario:
    """Apply `settings` to a document, and check it."""
    return check(ServingScenario, document, settings, path)
