"""One simulated run of a serving system."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from latency_models.step_time import StepTime
from schedulers.engine_core import EngineCore
from schedulers.lockstep import LockstepGroup
from schedulers.routing import router
from twin.clock import Clock
from twin.scenarios.serving import DisaggregatedSpec, FailureSpec
from twin.scenarios.serving_workload import ClosedLoopSpec
from twin.serving.clients import ClosedLoop, OpenLoop
from twin.serving.engine import Engine, Watch
from twin.serving.link import Link, LinkSpeed
from twin.serving.pace import Pace
from twin.serving.plan import ServingPlan, engine_names
from twin.serving.records import Columns, EngineLog, RequestRecord
from twin.serving.system import Pool, System
from workloads.request import Request

FAILURE_RANK = 1
"""An engine fails after requests have arrived at the same instant, and before any step ends."""


@dataclass(frozen=True)
class Run:
    """What one run left: its requests, its engines' logs and counters, its links.

    Attributes:
        columns: one entry a request. logs: one a engine. engines, links: the plant as it stands at the end.
        population: ∫ requests in the system dt, counted as they came and went. end: when the last event was, seconds.
    """

    columns: Columns
    logs: list[EngineLog]
    engines: list[Engine]
    links: dict[str, Link]
    population: float
    end: float


def simulate(
    plan: ServingPlan,
    replication: int = 0,
    draw: int | None = None,
    watch: Watch | None = None,
    pace: Pace | None = None,
) -> Run:
    """Run the scenario once.

    Args:
        replication: which realisation of the workload: other seeds, the same distributions.
        draw: which draw of the step-time model's fitted coefficients, where it has a covariance; None: the estimates.
        watch: called for each step that begins: all of them with `fast_forward: false`, else those not passed over.
        pace: of the machine, which the scheduler does not know of; None: it holds still.

    Raises:
        AssertionError: requests were lost or blocks leaked; never, unless the twin is wrong.
    """
    scenario = plan.scenario
    for_workload, for_routing, for_clients = _generators(plan, replication)
    clock = Clock()
    columns = Columns(detail=scenario.detail)
    population = Population(clock)
    system = _build(plan, clock, for_routing, draw, watch, pace)
    requests = plan.workload.requests(for_workload, plan.requests)
    spec = scenario.workload.arrivals
    client: OpenLoop | ClosedLoop
    if isinstance(spec, ClosedLoopSpec):
        client = ClosedLoop(clock, system, requests, spec.concurrency, spec.pauses(for_clients))
    else:
        client = OpenLoop(clock, system, requests)

    def done(record: RequestRecord) -> None:
        population.leave()
        columns.add(record)
        client.done(record)

    system.on_done, system.on_arrival = done, population.arrive
    for failure in scenario.failures:
        _plan_failure(clock, system, failure)
    client.start()
    with _collector_at_rest():
        clock.run()
    _check(plan, system, columns)
    logs = [engine.log for engine in system.engines()]
    return Run(columns, logs, system.engines(), _named_links(system), population.area, clock.now)


def realisation(plan: ServingPlan, replication: int) -> list[tuple[Request, int]]:
    """The requests that `simulate` sends in a replication, each with the length of its answer."""
    return list(plan.workload.requests(_generators(plan, replication)[0], plan.requests))


def _generators(plan: ServingPlan, replication: int) -> list[np.random.Generator]:
    """One for the workload, one for routing, one for clients."""
    seeds = np.random.SeedSequence([plan.scenario.seed, replication])
    return [np.random.default_rng(seed) for seed in seeds.spawn(3)]


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """No garbage collection: what a simulation lets go of holds no cycles, and looking for them takes a tenth of it."""
    was_at_work = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_at_work:
            gc.enable()


class Population:
    """Counts who is in the system, for Little's law: ∫ L dt must be the sum of all times in the system."""

    def __init__(self, clock: Clock) -> None:
        self.area = 0.0
        self._clock, self._count, self._since = clock, 0, 0.0

    def arrive(self) -> None:
        """One comes."""
        now = self._clock.now
        self.area += self._count * (now - self._since)
        self._count, self._since = self._count + 1, now

    def leave(self) -> None:
        """One goes."""
        now = self._clock.now
        self.area += self._count * (now - self._since)
        self._count, self._since = self._count - 1, now


def _build(
    plan: ServingPlan,
    clock: Clock,
    rng: np.random.Generator,
    draw: int | None,
    watch: Watch | None,
    pace: Pace | None,
) -> System:
    scenario, spec = plan.scenario, plan.scenario.system
    front_names, back_names = engine_names(scenario)
    make_core = functools.partial(_make_core, plan)
    engines: dict[str, Engine] = {}

    def pools(names: dict[str, list[str]], step_time: StepTime) -> dict[str, Pool]:
        made: dict[int, Pool] = {}
        for pool in names.values():
            if id(pool) in made:
                continue
            for name in pool:
                engines[name] = Engine(
                    clock, make_core, step_time, name=name, index=len(engines),
                    depth=2 if scenario.engine.async_scheduling else 1,
                    fast_forward=scenario.fast_forward, detail=scenario.detail, watch=watch, pace=pace,
                )  # fmt: skip
            made[id(pool)] = Pool([engines[name] for name in pool], router(spec.routing, _drawer(rng)))
        return {model: made[id(pool)] for model, pool in names.items()}

    front = pools(front_names, _drawn(plan.step_time, scenario.seed, draw))
    back = pools(back_names, _drawn(plan.decode_step_time, scenario.seed, draw))
    links: dict[str, Link] = {}
    if isinstance(spec, DisaggregatedSpec):
        speed = LinkSpeed(spec.link.bandwidth, spec.link.latency, spec.link.bytes_per_token)
        common = Link(clock, speed)
        for pool in front_names.values():
            links.update({name: common if spec.link.shared else Link(clock, speed) for name in pool})
    return System(clock, front, back, links)


def _named_links(system: System) -> dict[str, Link]:
    """Links by the engine that they leave, or as one where all share it."""
    links = system.links
    shared = len({id(link) for link in links.values()}) < len(links)
    return {"shared": next(iter(links.values()))} if shared else dict(links)


def _make_core(plan: ServingPlan) -> EngineCore | LockstepGroup:
    def one() -> EngineCore:
        return EngineCore(plan.config, plan.chunks())

    ranks = plan.scenario.engine.data_parallel
    return LockstepGroup(one, ranks) if ranks > 1 else one()


def _drawer(rng: np.random.Generator) -> functools.partial[int]:
    return functools.partial(_whole, rng)


def _whole(rng: np.random.Generator, size: int) -> int:
    return int(rng.integers(size))


def _drawn(step_time: StepTime, seed: int, draw: int | None) -> StepTime:
    """The model itself, or one drawn from what its fit leaves open."""
    sample = getattr(step_time, "draw", None)
    if draw is None or sample is None:
        return step_time
    drawn: StepTime = sample(np.random.default_rng([seed, draw, 1]))
    return drawn


def _plan_failure(clock: Clock, system: System, failure: FailureSpec) -> None:
    engine = next(engine for engine in system.engines() if engine.name == failure.engine)

    def fail(number: int) -> None:
        system.fail(engine)

    def recover(number: int) -> None:
        system.recover(engine)

    clock.call(failure.at, FAILURE_RANK, fail)
    clock.call(failure.at + failure.duration, FAILURE_RANK, recover)


def _check(plan: ServingPlan, system: System, columns: Columns) -> None:
    if len(columns.arrival) != plan.requests:
        raise AssertionError(f"{plan.requests} requests were sent, {len(columns.arrival)} were answered")
    for engine in system.engines():
        engine.core.check_integrity()
        if engine.free_blocks != engine.blocks:
            raise AssertionError(f"{engine.name}: {engine.free_blocks} of {engine.blocks} blocks are free")
