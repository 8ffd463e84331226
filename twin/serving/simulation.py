"""A simulation of a serving system: its parts, and one run of it, `Simulation(scenario).run()`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scenarios.serving import ServingScenario
from scenarios.serving_workload import ClosedLoopSpec
from twin.environment import Environment
from twin.serving.clients import ClosedLoop, OpenLoop
from twin.serving.engine import Engine, Watch
from twin.serving.link import Link
from twin.serving.machine_speed import MachineSpeed
from twin.serving.plan import ServingPlan, make_plan
from twin.serving.records import Columns, EngineLog, RequestRecord, StepIntegral
from twin.serving.system import System
from twin.serving.topologies.parts import Parts
from twin.serving.topologies.registry import TOPOLOGIES
from workloads.request import Request


@dataclass(frozen=True)
class Run:
    """The result of a simulation.

    Attributes:
        columns: one entry a request. logs: one an engine. engines, links: in their states at the end.
        population: ∫ requests in the system dt, counted at arrivals and departures.
        end: when the last answer was complete and the last step had ended, seconds.
    """

    columns: Columns
    logs: list[EngineLog]
    engines: list[Engine]
    links: dict[str, Link]
    population: float
    end: float


class Simulation:
    """One run of a serving system, not started yet.

    Args:
        scenario: a checked scenario whose paths start from the current folder, or the plan of one (`make_plan`).
        replication: which realisation of the workload: other seeds, the same distributions.
        draw: which draw of the step-time model's coefficients; None: the fitted ones.
        watch: called for each step that begins: for every step with `fast_forward: false`, else for those that are not
            passed over.
        machine_speed: of the machine over time, unknown to the scheduler; None: constant.

    Attributes:
        environment: the SimPy environment. system: engines, pools and links. clients: the senders of requests.
        columns: the finished requests so far. population: the integral of requests in the system.
        outages: the processes that let engines fail.
    """

    def __init__(
        self,
        scenario: ServingScenario | ServingPlan,
        replication: int = 0,
        draw: int | None = None,
        watch: Watch | None = None,
        machine_speed: MachineSpeed | None = None,
    ) -> None:
        if isinstance(scenario, ServingPlan):
            plan, scenario = scenario, scenario.scenario
        else:
            plan = make_plan(scenario, Path(), scenario.workload.read_trace(Path()))
        for_workload, for_routing, for_clients = _generators(plan, replication)
        self.plan = plan
        self.environment = env = Environment()
        self.columns = Columns(detail=scenario.detail)
        self.population = StepIntegral()
        parts = Parts(plan, env, for_routing, draw, watch, machine_speed)
        self.system = TOPOLOGIES.select(scenario.system.topology)(parts)
        self.system.on_arrival, self.system.on_finish = self._arrived, self._finished
        engines = {engine.name: engine for engine in self.system.engines()}
        self.outages = [
            env.process(self.system.outage(engines[failure.engine], failure.at, failure.duration))
            for failure in scenario.failures
        ]
        self.clients = _clients(plan, env, self.system, for_workload, for_clients)

    def run(self) -> Run:
        """Run until every request is answered.

        Raises:
            BadInput: a request does not fit into an engine's KV memory, even alone.
            AssertionError: requests were lost or blocks leaked, which is an error of the simulator.
        """
        with _paused_garbage_collection():
            self.environment.run()
        self._check()
        system, columns = self.system, self.columns
        logs = [engine.log for engine in system.engines()]
        end = max([*columns.last_token, *(log.ends[-1] for log in logs if log.ends)], default=0.0)
        return Run(columns, logs, system.engines(), _named_links(system), self.population.area, end)

    def _arrived(self) -> None:
        self.population.set(self.environment.now, self.population.value + 1)

    def _finished(self, record: RequestRecord) -> None:
        self.population.set(self.environment.now, self.population.value - 1)
        self.columns.add(record)
        self.clients.finished(record)

    def _check(self) -> None:
        finished = len(self.columns.arrival)
        if finished != self.plan.requests:
            raise AssertionError(f"expected {self.plan.requests} finished requests, found {finished}")
        for engine in self.system.engines():
            engine.core.check_integrity()
            if engine.free_blocks != engine.blocks:
                raise AssertionError(f"{engine.name}: {engine.free_blocks} of {engine.blocks} blocks are free")


def realisation(plan: ServingPlan, replication: int) -> list[tuple[Request, int]]:
    """The requests of a replication, each with the length of its answer in tokens."""
    return list(plan.workload.requests(_generators(plan, replication)[0], plan.requests))


def _generators(plan: ServingPlan, replication: int) -> list[np.random.Generator]:
    """Random generators for the workload, for routing and for clients."""
    seeds = np.random.SeedSequence([plan.scenario.seed, replication])
    return [np.random.default_rng(seed) for seed in seeds.spawn(3)]


@contextlib.contextmanager
def _paused_garbage_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector, which takes a tenth of a run and finds nothing: a run drops no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _clients(
    plan: ServingPlan,
    env: Environment,
    system: System,
    for_workload: np.random.Generator,
    for_clients: np.random.Generator,
) -> OpenLoop | ClosedLoop:
    requests = plan.workload.requests(for_workload, plan.requests)
    spec = plan.scenario.workload.arrivals
    if isinstance(spec, ClosedLoopSpec):
        return ClosedLoop(env, system, requests, spec.concurrency, spec.pauses(for_clients))
    return OpenLoop(env, system, requests)


def _named_links(system: System) -> dict[str, Link]:
    """Links by the name of the engine that they leave; one `shared` link if all engines share it."""
    links = system.links
    shared = len({id(link) for link in links.values()}) < len(links)
    return {"shared": next(iter(links.values()))} if shared else dict(links)
