"""Autoscaling in the simulation: engines that start, serve, drain and stop, as an autoscaler decides.

Engines are there from the beginning, as many as a pool may have at most, but routers see only those that are up. The
life of one is: stopped, starting (it loads its weights and warms up), up, draining (it gets no more requests, and
finishes its own), stopped. It is paid for from the start to the stop. An outage takes an engine down in any of these
states: one that starts begins anew afterwards, one that drains is stopped at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from simpy.events import Event

from scenarios.overload import AutoscalingSpec
from schedulers.admission_control import RequestShed
from schedulers.autoscaling import EngineMetrics, Observation
from schedulers.sequence import Sequence
from twin.environment import Environment, Priority
from twin.serving.engine.engine import Engine
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.plan.pools import PlannedPool
from twin.serving.records.engine_log import StepIntegral
from twin.serving.records.requests import RequestRecord
from twin.serving.system.prediction import Predictor
from twin.serving.system.system import System

STOPPED, STARTING, UP, DRAINING = "stopped", "starting", "up", "draining"


@dataclass
class ScalingLog:
    """The history of the engines of one pool that serve the same models.

    Attributes:
        pool: its name. engines: names.
        changes: rows (time, up, starting, draining, failed): engines from `time` on. A failed engine that is paid for
            is counted as failed alone.
        paid: the times, seconds, from which and to which each engine was paid for, by name; None: to the end.
        started, stopped: how often an engine was started, and was to be stopped.
    """

    pool: str
    engines: list[str]
    changes: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    paid: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    started: int = 0
    stopped: int = 0

    def engine_seconds(self, end: float) -> dict[str, float]:
        """The time up to `end` for which each engine is paid, seconds, by name."""
        return {name: self.seconds(name, end) for name in self.paid}

    def seconds(self, name: str, end: float) -> float:
        """The time up to `end` for which one engine is paid, seconds; 0.0 for one that was never started."""
        spans = self.paid.get(name, [])
        return sum((max(min(end if stop is None else stop, end) - start, 0.0) for start, stop in spans), 0.0)


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


class _Instance:
    """One engine and its state.

    Attributes:
        since: when its state began, seconds. life: counts changes of state, so that an event that was waited for in an
            earlier state can be told. seen: the time of the latest observation, or when it was up again. busy, running:
            integrals of these then.
    """

    __slots__ = ("busy", "engine", "life", "running", "seen", "since", "state")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.state = STOPPED
        self.since = self.seen = self.busy = self.running = 0.0
        self.life = 0

    def enter(self, state: str, now: float) -> None:
        self.state = state
        self.since = now
        self.life += 1

    def metrics(self, now: float) -> EngineMetrics | None:
        """The metrics since this was called last; None if that was now."""
        engine, seconds = self.engine, now - self.seen
        busy, running = self.busy, self.running
        self.seen = now
        self.busy = engine.busy_until(now)
        self.running = engine.log.running_seqs.until(now)
        if not seconds:
            return None
        return EngineMetrics(
            (self.busy - busy) / seconds,
            (self.running - running) / seconds / engine.max_num_seqs,
            1 - engine.free_blocks / engine.blocks,
            engine.num_running,
            engine.num_waiting,
        )


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
        self._system = group.system
        self._group = group
        self._spec = spec
        self._latencies = predictor.latencies
        self._is_over = is_over
        self._autoscaler = spec.build(predictor.predict)
        self._replicas = initial
        self._instances = [_Instance(engine) for engine in group.engines]
        self._by_name = {instance.engine.name: instance for instance in self._instances}
        self.log = ScalingLog(group.pool, [engine.name for engine in group.engines])
        for position, instance in enumerate(self._instances):
            if position < initial:
                instance.enter(UP, env.now)
                self.log.paid[instance.engine.name] = [(env.now, None)]
            else:
                instance.engine.in_service = False
            self._watch_finishes(instance)
        self._note()

    def run(self) -> Generator[Event, object, None]:
        """Decide every `sync_period` seconds until all requests are answered. To be started as a process."""
        env, period, syncs = self._env, self._spec.sync_period, 0
        while True:
            syncs += 1
            yield env.at(syncs * period, Priority.SCALING)
            if self._is_over():
                return
            replicas = self._autoscaler.decide(self._observe())
            if replicas < self._replicas:
                self.log.stopped += self._replicas - replicas
            self._replicas = replicas
            self._adjust()

    def on_outage(self, engine: Engine) -> None:
        instance = self._by_name.get(engine.name)
        if instance is None:
            return
        if instance.state == STARTING:
            instance.life += 1
            if not engine.failed:
                self._env.process(self._start_up(instance))
        elif instance.state == DRAINING and engine.failed:
            self._stop(instance)
            self._adjust()
        elif not engine.failed:
            instance.metrics(self._env.now)  # from now on
        self._note()

    def on_release(self, engine: Engine) -> None:
        instance = self._by_name.get(engine.name)
        if instance is not None and instance.state == DRAINING:
            self._stop_when_idle(instance)

    # -- what the autoscaler sees --------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        now = self._env.now
        up = [instance for instance in self._instances if instance.state == UP and not instance.engine.failed]
        metrics = [values for instance in up if (values := instance.metrics(now)) is not None]
        failed = sum(instance.engine.failed and instance.state in (UP, STARTING) for instance in self._instances)
        return Observation(
            now, self._replicas, tuple(metrics),
            starting=self._replicas - len(metrics) - failed, failed=failed, draining=self._count(DRAINING),
            queued=len(self._group.stranded()), latencies=self._latencies(),
            min_replicas=self._spec.min_replicas, max_replicas=self._spec.max_replicas,
        )  # fmt: skip

    # -- the life of an engine -----------------------------------------------------------------------------------------

    def _adjust(self) -> None:
        """Start or stop engines until there are as many as there should be, as far as some are free."""
        alive = [instance for instance in self._instances if instance.state in (STARTING, UP)]
        free = sorted(
            (instance for instance in self._instances if instance.state == STOPPED),
            key=lambda instance: instance.engine.failed,
        )
        for instance in free[: max(self._replicas - len(alive), 0)]:
            self._start(instance)
        if len(alive) > self._replicas:
            for instance in sorted(alive, key=_keep_first)[self._replicas :]:
                self._drain(instance)
            self._system.refresh()
        self._note()

    def _start(self, instance: _Instance) -> None:
        now = self._env.now
        instance.enter(STARTING, now)
        self.log.started += 1
        self.log.paid.setdefault(instance.engine.name, []).append((now, None))
        if not instance.engine.failed:
            self._env.process(self._start_up(instance))

    def _start_up(self, instance: _Instance) -> Generator[Event, object, None]:
        """Load weights and warm up; then the engine is up, unless its life took another turn meanwhile."""
        env, life = self._env, instance.life
        yield env.at(env.now + self._spec.start_up.seconds, Priority.SCALING)
        if instance.life == life:
            instance.engine.restart()
            instance.enter(UP, env.now)
            instance.metrics(env.now)  # from now on
            instance.engine.in_service = True
            self._system.refresh()
            self._note()

    def _drain(self, instance: _Instance) -> None:
        """Give an engine no more requests, and stop it when it has none."""
        idle = instance.state == STARTING or instance.engine.failed
        instance.engine.in_service = False
        instance.enter(DRAINING, self._env.now)
        if idle or instance.engine.is_idle:
            self._stop(instance)

    def _stop(self, instance: _Instance) -> None:
        now, spans = self._env.now, self.log.paid[instance.engine.name]
        instance.enter(STOPPED, now)
        spans[-1] = spans[-1][0], now

    def _watch_finishes(self, instance: _Instance) -> None:
        """Have an engine that drains stopped when its last request is finished, or shed."""
        engine, finished, was_shed = instance.engine, instance.engine.on_finish, instance.engine.on_shed

        def on_finish(record: RequestRecord, sequence: Sequence) -> None:
            finished(record, sequence)
            if instance.state == DRAINING:
                self._stop_when_idle(instance)

        def on_shed(record: RequestRecord, shed: RequestShed) -> None:
            was_shed(record, shed)
            if instance.state == DRAINING:
                self._stop_when_idle(instance)

        engine.on_finish = on_finish
        engine.on_shed = on_shed

    def _stop_when_idle(self, instance: _Instance) -> None:
        """Stop an engine that drains if it is idle when everything else of this instant has happened."""
        life = instance.life

        def look(event: Event) -> None:
            if instance.life == life and instance.engine.is_idle:
                self._stop(instance)
                self._adjust()

        self._env.at(self._env.now, Priority.LATE).callbacks.append(look)

    def _count(self, state: str) -> int:
        return sum(instance.state == state for instance in self._instances)

    def _note(self) -> None:
        """Note how many engines are in each state."""
        sound = [instance.state for instance in self._instances if not instance.engine.failed]
        failed = sum(instance.engine.failed and instance.state != STOPPED for instance in self._instances)
        row = (float(self._env.now), sound.count(UP), sound.count(STARTING), sound.count(DRAINING), failed)
        changes = self.log.changes
        if changes and changes[-1][0] == row[0]:
            changes.pop()
        if not changes or changes[-1][1:] != row[1:]:
            changes.append(row)


def _keep_first(instance: _Instance) -> tuple[bool, bool, float, int]:
    """The order in which engines are kept: those that are up, the oldest first; then those that start; then failed."""
    return instance.engine.failed, instance.state != UP, instance.since, instance.engine.index
