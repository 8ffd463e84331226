"""A simulation of a serving system: its parts, and one run of it, `Simulation(scenario).run()`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scenarios.serving import ServingScenario
from scenarios.serving_workload import ClosedLoopSpec
from twin.environment import Environment
from twin.process import paused_garbage_collection
from twin.serving.clients import ClosedLoop, OpenLoop
from twin.serving.engine import Engine, Watch
from twin.serving.link import Link
from twin.serving.machine_speed import MachineSpeed
from twin.serving.plan import ServingPlan, make_plan
from twin.serving.randomness import Draw
from twin.serving.records import Columns, EngineLog, RequestRecord, Sink, StepIntegral
from twin.serving.session_clients import ClosedSessions, OpenSessions
from twin.serving.session_log import SessionLog
from twin.serving.system import System
from twin.serving.topologies.parts import Parts
from twin.serving.topologies.registry import TOPOLOGIES
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.request import Request


@dataclass(frozen=True)
class Run:
    """The result of a simulation.

    Attributes:
        columns: one entry a request. logs: one an engine. engines, links: in their states at the end.
        population: ∫ requests in the system dt, counted at arrivals and departures.
        end: when the last answer was complete and the last step had ended, seconds.
        outside: axes on which steps lay beyond the measurements of step times, with the largest value on each.
        sessions: the finished sessions; None for a workload without sessions.
    """

    columns: Columns
    logs: list[EngineLog]
    engines: list[Engine]
    links: dict[str, Link]
    population: float
    end: float
    outside: dict[str, float]
    sessions: SessionLog | None = None

    def request_table(self) -> dict[str, Any]:
        """All columns of the requests by name, in the order in which they finished. Needs detail."""
        table = self.columns.table()
        return table if self.sessions is None else table | self.sessions.columns_of(table["id"])


class Simulation:
    """One run of a serving system, not started yet.

    Args:
        scenario: a checked scenario whose paths start from the current folder, or the plan of one (`make_plan`).
        replication: which realisation of the workload: other seeds, the same distributions.
        draw: of what is not known; None: all at the estimates.
        watch: called for each step that begins: for every step with `fast_forward: false`, else for those that are not
            passed over.
        machine_speed: of the machine over time, unknown to the scheduler; None: constant.
        sink: gets the finished requests in parts, which then leave memory but for what the summary needs.

    Attributes:
        environment: the SimPy environment. system: engines, pools and links. clients: the senders of requests.
        columns: the finished requests so far. population: the integral of requests in the system.
        outages: the processes that let engines fail.
    """

    def __init__(
        self,
        scenario: ServingScenario | ServingPlan,
        replication: int = 0,
        draw: Draw = None,
        watch: Watch | None = None,
        machine_speed: MachineSpeed | None = None,
        sink: Sink | None = None,
    ) -> None:
        if isinstance(scenario, ServingPlan):
            plan, scenario = scenario, scenario.scenario
        else:
            plan = make_plan(scenario, Path(), scenario.workload.read_trace(Path()))
        for_workload, for_routing, for_clients = _generators(plan, replication)
        self.plan = plan = plan.for_one_run()
        self.environment = env = Environment()
        self.columns = Columns(detail=bool(scenario.detail), sink=sink)
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
        if watch is None:
            _foresee(plan, self.system, self.clients)

    def run(self) -> Run:
        """Run until every request is answered.

        Raises:
            BadInput: a request does not fit into an engine's KV memory, even alone.
            AssertionError: requests were lost or blocks leaked, which is an error of the simulator.
        """
        with paused_garbage_collection():  # it takes a tenth of a run and finds nothing: a run drops no cycles
            self.environment.run()
        self._check()
        self.columns.flush()
        system, columns = self.system, self.columns
        logs = [engine.log for engine in system.engines()]
        end = max([max(columns.last_token, default=0.0), *(log.ends[-1] for log in logs if log.ends)])
        sessions = self.clients.log if isinstance(self.clients, OpenSessions | ClosedSessions) else None
        links, outside = _named_links(system), self.plan.outside()
        return Run(columns, logs, system.engines(), links, self.population.area, end, outside, sessions)

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
    """The requests of a replication, each with the length of its answer in tokens.

    Raises:
        BadInput: a workload of sessions, whose requests depend on the answers.
    """
    if not isinstance(plan.workload, Workload):
        raise BadInput("expected none: requests are listed before any is answered", field="workload.sessions")
    return list(plan.workload.requests(_generators(plan, replication)[0], plan.requests))


def _generators(plan: ServingPlan, replication: int) -> list[np.random.Generator]:
    """Random generators for the workload, for routing and for clients."""
    seeds = np.random.SeedSequence([plan.scenario.seed, replication])
    return [np.random.default_rng(seed) for seed in seeds.spawn(3)]


def _clients(
    plan: ServingPlan,
    env: Environment,
    system: System,
    for_workload: np.random.Generator,
    for_clients: np.random.Generator,
) -> OpenLoop | ClosedLoop | OpenSessions | ClosedSessions:
    workload, spec = plan.workload, plan.scenario.workload.arrivals
    if isinstance(workload, Workload):
        requests = workload.requests(for_workload, plan.requests)
        if isinstance(spec, ClosedLoopSpec):
            return ClosedLoop(env, system, requests, spec.concurrency, spec.pauses(for_clients))
        return OpenLoop(env, system, requests, max(map(len, plan.groups)))
    sessions, log = workload.sessions(for_workload, plan.requests), SessionLog(detail=bool(plan.scenario.detail))
    if isinstance(spec, ClosedLoopSpec):
        return ClosedSessions(env, system, sessions, log, spec.concurrency, spec.pauses(for_clients))
    return OpenSessions(env, system, sessions, log)


def _foresee(plan: ServingPlan, system: System, clients: OpenLoop | ClosedLoop | OpenSessions | ClosedSessions) -> None:
    """Let engines visit step ends early where nothing can come in between: no failure, no transfer,
    and no request that follows an answer.

    An engine that several routers choose is left out, too.
    """
    if not isinstance(clients, OpenLoop) or plan.scenario.failures or system.decode_pools:
        return
    pools = system.pools()
    if sum(len(pool.engines) for pool in pools) == len(system.engines()):
        for pool in pools:
            pool.foresee(clients)


def _named_links(system: System) -> dict[str, Link]:
    """Links by the name of the engine that they leave; one `shared` link if all engines share it."""
    links = system.links
    shared = len({id(link) for link in links.values()}) < len(links)
    return {"shared": next(iter(links.values()))} if shared else dict(links)
