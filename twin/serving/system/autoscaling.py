"""Autoscaling in the simulation: the times at which a `ReplicaSet` decides, and its engines start and are idle."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from scenarios.overload import AutoscalingSpec
from schedulers.replica_set import DRAINING, Replica, ReplicaSet, ScalingLog
from twin.environment import Environment, Priority
from twin.serving.engine.engine import Engine
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.plan.pools import PlannedPool
from twin.serving.records.engine_log import StepIntegral
from twin.serving.records.requests import RequestRecord
from twin.serving.system.prediction import Predictor
from twin.serving.system.system import System


class Autoscaling:
    """The autoscaling of a simulation, beside its system: a `PoolScaler` for engines that serve the same models.

    Args:
        plan, env, system, draw, population: of the simulation. seed: for predictions.
    """

    def __init__(
        self, plan: ServingPlan, env: Environment, system: System, draw: Draw, seed: int, population: StepIntegral
    ) -> None:
        scenario = plan.scenario
        sections = scenario.system.autoscaling or {}
        initial = {pool.name: pool.replicas for pool in scenario.system.expand(scenario.engine, scenario.step_time)}
        engines = {engine.name: engine for engine in system.engines()}
        self._population = population
        self._to_come = plan.requests
        self._predictors: list[Predictor] = []
        self._scalers: list[PoolScaler] = []
        for pool in plan.pools:
            spec = sections.get(pool.spec.name)
            for names, models in _groups(pool) if spec is not None else ():
                assert spec is not None, "pools without a section have no groups"
                group = Group(
                    system, pool.spec.name, frozenset(models), [engines[name] for name in names],
                    decodes=pool.spec.role == "decode",
                )  # fmt: skip
                predictor = Predictor(plan, pool, models, names, spec, group.records, env, draw, seed)
                if spec.latency_goals:
                    self._predictors.append(predictor)
                self._scalers.append(PoolScaler(env, group, initial[pool.spec.name], spec, predictor, self._is_over))
        system.on_outage = self._on_outage
        system.on_release = self._on_release
        system.refresh()
        self.processes = [env.process(scaler.run()) for scaler in self._scalers]

    @property
    def logs(self) -> list[ScalingLog]:
        """The log of each group of engines."""
        return [scaler.log for scaler in self._scalers]

    def arrived(self, record: RequestRecord) -> None:
        self._to_come -= 1
        for predictor in self._predictors:
            predictor.arrived(record)

    def _is_over(self) -> bool:
        """Tell whether all requests have come and gone."""
        return self._to_come == 0 == self._population.value

    def _on_outage(self, engine: Engine) -> None:
        for scaler in self._scalers:
            scaler.on_outage(engine)

    def _on_release(self, engine: Engine) -> None:
        for scaler in self._scalers:
            scaler.on_release(engine)


def _groups(pool: PlannedPool) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The engines of a pool that serve the same models, and these models."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for model, names in pool.engines.items():
        groups.setdefault(tuple(names), []).append(model)
    yield from groups.items()


@dataclass(frozen=True)
class Group:
    """Engines of a pool that serve the same models, as many as there may be at most.

    Attributes:
        pool: the pool's name. decodes: whether they get requests from prefill engines.
    """

    system: System
    pool: str
    models: frozenset[str]
    engines: list[Engine]
    decodes: bool = False

    def stranded(self) -> list[RequestRecord]:
        """The requests for these models that wait because no engine is up."""
        return [
            record
            for record in self.system.stranded
            if record.request.model in self.models and bool(record.delivered) == self.decodes
        ]

    def records(self) -> list[RequestRecord]:
        """The unfinished requests that the engines have, or that wait for one of them."""
        return [record for engine in self.engines for record in engine.records] + self.stranded()


class PoolScaler:
    """Scales a group of engines by the decisions of an autoscaler.

    Args:
        env: of the simulation. initial: the number of engines that are up at first. spec: the pool's section.
        predictor: for policies with goals. is_over: tells whether all requests have come and gone.
    """

    def __init__(
        self,
        env: Environment,
        group: Group,
        initial: int,
        spec: AutoscalingSpec,
        predictor: Predictor,
        is_over: Callable[[], bool],
    ) -> None:
        self._env = env
        self._group = group
        self._spec = spec
        self._latencies = predictor.latencies
        self._is_over = is_over
        self._replicas = ReplicaSet(
            group.pool, group.engines, initial, spec.build(predictor.predict),
            lambda replica: env.process(self._start_up(replica)), group.system.refresh,
        )  # fmt: skip
        self.log = self._replicas.log
        for engine, replica in zip(group.engines, self._replicas.replicas, strict=True):
            engine.on_finish = self._then_stop(replica, engine.on_finish)
            engine.on_shed = self._then_stop(replica, engine.on_shed)

    def run(self) -> Generator[Event, object, None]:
        """Decide every `sync_period` seconds until all requests are answered. To be started as a process."""
        env, period, syncs = self._env, self._spec.sync_period, 0
        while True:
            syncs += 1
            yield env.at(syncs * period, Priority.SCALING)
            if self._is_over():
                return
            self._replicas.decide(env.now, len(self._group.stranded()), self._latencies())

    def on_outage(self, engine: Engine) -> None:
        self._replicas.note_outage(engine, self._env.now)

    def on_release(self, engine: Engine) -> None:
        replica = self._replicas.of(engine)
        if replica is not None:
            self._stop_when_idle(replica)

    def _start_up(self, replica: Replica) -> Generator[Event, object, None]:
        """Load weights and warm up; then the engine is up, unless its life took another turn meanwhile."""
        env, life = self._env, replica.life
        yield env.at(env.now + self._spec.start_up.seconds, Priority.SCALING)
        if replica.life == life:
            self._replicas.put_up(replica, env.now)

    def _then_stop(self, replica: Replica, listener: Callable[[RequestRecord, Any], None]) -> Callable[..., None]:
        """A listener to ends of requests that also has an engine stopped which drains and has ended its last one."""

        def on_end(record: RequestRecord, end: Any) -> None:
            listener(record, end)
            self._stop_when_idle(replica)

        return on_end

    def _stop_when_idle(self, replica: Replica) -> None:
        """Stop an engine that drains if it is idle when everything else of this instant has happened."""
        if replica.state != DRAINING:
            return
        life = replica.life

        def look(event: Event) -> None:
            if replica.life == life:
                self._replicas.stop_idle(replica, self._env.now)

        self._env.at(self._env.now, Priority.LATE).callbacks.append(look)
