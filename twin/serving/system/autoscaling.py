"""Autoscaling in the simulation: when a `ReplicaSet` decides and its engines start, and its latency predictions.

A prediction says what latencies a number of engines would give to the load of the last minutes. It is a short
simulation, with the scheduler, step times and router of the pool. At its start there are the
requests that are in the system now. Then the requests of the last minutes come again, at the same intervals, and the
latencies of these count. With a linear forecast the intervals are shorter by the growth of the rate until an engine
that is started now is up. Answers that are not finished have lengths drawn from those that are; of an answer that has
begun, half is taken to be left. Prefix caches are empty at first. A prefill pool is simulated up to the first token, a
decode pool from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from simpy.events import Event

from reports.metrics import quantiles
from scenarios.fields import Goal
from scenarios.overload import AutoscalingSpec
from schedulers.replica_set import DRAINING, Replica, ReplicaSet, ScalingLog
from twin.environment import Alarm, Environment, Priority
from twin.serving.engine.engine import Engine
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.plan.pools import PlannedPool
from twin.serving.records.engine_log import StepIntegral
from twin.serving.records.requests import UNSET, RequestRecord
from twin.serving.system.system import System
from twin.serving.system.topologies import Parts
from workloads.request import Request


class Predictor:
    """Predicts latencies of the engines of one pool that serve the same models.

    Args:
        plan, draw: of the simulation. pool, group: the pool, and its engines that serve these models.
        spec: the pool's section. env: for the time. seed: of draws.
    """

    def __init__(
        self,
        plan: ServingPlan,
        pool: PlannedPool,
        group: Group,
        spec: AutoscalingSpec,
        env: Environment,
        draw: Draw,
        seed: int,
    ) -> None:
        scenario = plan.scenario.model_copy(update={"detail": False})
        self._plan = replace(plan, scenario=scenario, pools=[pool]).for_one_run()  # notes steps outside of measurements
        self._group = group
        self._spec = spec
        self._env = env
        self._draw = draw
        self._seed = seed
        self._goals = spec.latency_goals
        self._role = pool.spec.role
        self._lead = 0.0 if spec.forecast == "constant" else spec.start_up.seconds + spec.sync_period
        self._records: deque[RequestRecord] = deque()  # of the window, in order of arrival
        self._asked_at = -1.0
        self._load: list[_Coming] = []
        self._found: dict[int, dict[str, float]] = {}

    def arrived(self, record: RequestRecord) -> None:
        """Note a request, if it is for these models."""
        if record.request.model in self._group.models:
            self._records.append(record)
            self._forget()

    def latencies(self) -> dict[str, float]:
        """The latencies of requests of the window by goal, as far as they are known; seconds."""
        self._forget()
        if not self._goals:
            return {}
        return latencies_of([*self._records], self._goals)

    def predict(self, engines: int) -> Mapping[str, float]:
        if self._asked_at != self._env.now:
            self._asked_at = self._env.now
            self._forget()
            self._load = self._coming()
            self._found = {}
        if engines not in self._found:
            self._found[engines] = self._simulate(engines)
        return self._found[engines]

    def _forget(self) -> None:
        """Let requests that came before the window go."""
        records, start = self._records, self._env.now - self._spec.window
        while records and records[0].request.arrival < start:
            records.popleft()

    def _coming(self) -> list[_Coming]:
        """The requests of a prediction, in order."""
        now, decodes = self._env.now, self._role == "decode"
        lengths = [record.output_tokens for record in self._records if record.last_token != UNSET]
        rng = np.random.default_rng([self._seed, round(1e6 * now)])

        def answer(record: RequestRecord) -> int:
            if record.last_token != UNSET:
                return record.output_tokens
            length = lengths[int(rng.integers(len(lengths)))] if lengths else record.request.max_tokens
            return min(length, record.request.max_tokens)

        pending: list[_Coming] = []
        for record in self._group.records():
            begun, tokens = record.first_token != UNSET, answer(record)
            pending.append(_Coming(0.0, record.request, max(tokens // 2, 2) if begun else tokens, begun, judged=False))
        times = [(record.first_token if decodes else record.request.arrival, record) for record in self._records]
        again = sorted(
            (entry for entry in times if entry[0] != UNSET), key=lambda entry: (entry[0], entry[1].request.id)
        )
        recent = again[-self._spec.max_requests :]
        begin = max(now - self._spec.window, 0.0)
        start = begin if len(recent) == len(again) else recent[0][0]
        growth = 1.0
        if self._lead and now >= self._spec.window:  # a part of a window says little about growth
            growth = growth_until([time for time, _ in again], begin, now, now + self._lead)
        for time, record in recent:
            tokens = answer(record)
            if not decodes or tokens > 1:
                pending.append(_Coming(max(time - start, 0.0) / growth, record.request, tokens, decodes, judged=True))
        return pending

    def _simulate(self, engines: int) -> dict[str, float]:
        """Latencies by goal with a number of engines; none without requests."""
        if not any(pending.judged for pending in self._load):
            return {}
        env, models = Environment(), self._group.models
        names = tuple(engine.name for engine in self._group.engines[:engines])
        pool = replace(self._plan.pools[0], engines={model: list(names) for model in models})
        parts = Parts(replace(self._plan, pools=[pool]), env, np.random.default_rng(self._seed), self._draw)
        parts.make_engines()
        (served,) = {id(pool): pool for pool in parts.make_pools(dict.fromkeys(models, names)).values()}.values()
        alarm = Alarm(Priority.ARRIVAL, _never)
        judged: list[RequestRecord] = []
        for number, pending in enumerate(self._load):
            record = pending.record(number)
            if pending.judged:
                judged.append(record)
            if pending.time:
                env.run_to(alarm, pending.time)
            engine = served.choose(record.request)
            assert engine is not None, "engines of a prediction do not fail"
            max_tokens = 1 if self._role == "prefill" and not record.request.one_shot else None
            engine.submit(record, max_tokens=max_tokens, remote_prefill=pending.begun)
        env.run()
        return latencies_of(judged, self._goals)


@dataclass(slots=True)
class _Coming:
    """A request of a prediction.

    Attributes:
        time: when it comes, seconds. tokens: of its answer. begun: whether it has its first token. judged: whether its
            latencies count.
    """

    time: float
    request: Request
    tokens: int
    begun: bool
    judged: bool

    def record(self, number: int) -> RequestRecord:
        request = replace(self.request, id=number, arrival=self.time)
        record = RequestRecord(request, self.tokens)
        if self.begun:
            record.first_token = self.time
        return record


MOST_GROWTH = 4.0
"""The rate is forecast to grow, or to shrink, by this factor at most."""


def growth_until(times: Sequence[float], begin: float, end: float, until: float) -> float:
    """The rate at `until` over the mean rate of a window, by a straight line through the rates of its two halves."""
    half = (end - begin) / 2
    late = sum(time >= begin + half for time in times)
    if not times or not half:
        return 1.0
    early = len(times) - late
    growth = 1 + (late - early) / len(times) * (until - begin - half) / half
    return min(max(growth, 1 / MOST_GROWTH), MOST_GROWTH)


def latencies_of(records: Sequence[RequestRecord], goals: Sequence[Goal]) -> dict[str, float]:
    """Latencies by goal, seconds, of the requests that have them."""
    merged: dict[str, float] = {}
    for goal in goals:
        values = np.array([value for record in records if (value := _latency(record, goal.metric)) is not None])
        if len(values):
            merged[goal.name] = float(
                values.mean() if goal.quantile is None else quantiles(values, np.array([goal.quantile]))[0]
            )
    return merged


def _latency(record: RequestRecord, metric: str) -> float | None:
    if metric == "ttft":
        return None if record.first_token == UNSET else record.first_token - record.request.arrival
    if record.last_token == UNSET:
        return None
    if metric == "e2e":
        return record.last_token - record.request.arrival
    gaps = record.output_tokens - 1
    return (record.last_token - record.first_token) / gaps if gaps > 0 else None


def _never(time: float) -> None:
    raise AssertionError("the alarm marks how far to run, and does not ring")


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
        engines = {engine.name: engine for engine in system.engines}
        self._population = population
        self._to_come = plan.requests
        self._predictors: list[Predictor] = []
        self._scalers: list[PoolScaler] = []
        for pool in plan.pools:
            spec = sections.get(pool.spec.name)
            if spec is None:
                continue
            groups: dict[tuple[str, ...], list[str]] = {}  # models by the engines that serve them
            for model, served in pool.engines.items():
                groups.setdefault(tuple(served), []).append(model)
            for names, models in groups.items():
                decodes = pool.spec.role == "decode"
                group = Group(system, pool.spec.name, models, [engines[name] for name in names], decodes)
                predictor = Predictor(plan, pool, group, spec, env, draw, seed)
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


@dataclass(frozen=True)
class Group:
    """Engines of a pool that serve the same models, as many as there may be at most.

    Attributes:
        pool: the pool's name. models: in order. decodes: whether they get requests from prefill engines.
    """

    system: System
    pool: str
    models: list[str]
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
