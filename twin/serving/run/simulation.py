"""A simulation of a serving system: its parts, and one run of it, `Simulation(plan).run()`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from scenarios.serving import ClosedLoopSpec
from schedulers.admission_control import RequestShed
from twin.environment import Environment
from twin.process import paused_garbage_collection
from twin.serving.engine.engine_state import Watch
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.records.engine_log import StepFile, StepIntegral, StepKeeper
from twin.serving.records.requests import Columns, PrefixReuse, RequestRecord, SessionLog, ShedLog, Sink
from twin.serving.results.summary import Run
from twin.serving.run.clients import ClosedLoop, OpenLoop, SessionClients
from twin.serving.system.system import System
from twin.serving.system.topologies import TOPOLOGIES, Parts
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.request import Request
from workloads.sessions import Session

if TYPE_CHECKING:
    from twin.serving.system.autoscaling import Autoscaling


class Simulation:
    """One run of a serving system, not started yet.

    Args:
        plan: of a scenario (`make_plan`).
        replication: which realisation of the workload: other seeds, the same distributions.
        draw: of what is not known; None: all at the estimates.
        watch: called for each step that begins: for every step with `fast_forward: false`, else for those that are not
            passed over.
        drafts: which luck the drafts have, in the same replication; where their outcomes were measured, other numbers
            than 0 also draw which ones might have been.
        sink: gets the finished requests in parts, which then leave memory but for what the summary needs.

    Attributes:
        environment: the SimPy environment. system: engines, pools and links. clients: the senders of requests.
        columns: the finished requests so far. population: the integral of requests in the system.
        outages: the processes that let engines fail. autoscaling: the processes that change their number, if any do.
    """

    def __init__(
        self,
        plan: ServingPlan,
        replication: int = 0,
        draw: Draw = None,
        watch: Watch | None = None,
        sink: Sink | None = None,
        drafts: int = 0,
    ) -> None:
        scenario = plan.scenario
        for_workload, for_routing, for_clients = plan.generators(replication)
        self.plan = plan = plan.for_one_run()
        self.environment = env = Environment()
        self.prefix_reuse: PrefixReuse | None = None
        self.columns = Columns(
            detail=bool(scenario.detail), sink=sink, after_part=self._keep_steps, clients=plan.clients
        )
        self._keep = StepKeeper(StepFile)
        seed = (scenario.seed << 20) + replication
        luck = seed + (drafts << 52)
        parts = Parts(plan, env, for_routing, draw, watch, speculation_seed=luck, drafts=drafts)
        self.system = TOPOLOGIES.select(scenario.system.topology)(parts)
        if scenario.measure.prefix_cache:
            self.prefix_reuse = PrefixReuse(plan.scheduler.config.prefix_id_tokens, _cache_sizes(self.system))
        self.population = self.system.population = StepIntegral()
        self.shed: ShedLog | None = None
        if any(pool.scheduler.config.admission_control is not None for pool in plan.pools):
            self.shed = ShedLog(plan.clients)
            for engine in self.system.engines:
                engine.on_shed = self._shed
        self._retries = scenario.workload.retries
        self._rng = for_clients.spawn(1)[0] if self._retries else for_clients
        engines = {engine.name: engine for engine in self.system.engines}
        self.outages = [
            env.process(self.system.outage(engines[failure.engine], failure.at, failure.duration))
            for failure in scenario.failures
        ]
        self.autoscaling: Autoscaling | None = None
        if scenario.system.autoscaling:
            from twin.serving.system.autoscaling import Autoscaling

            self.autoscaling = Autoscaling(plan, env, self.system, draw, seed, self.population)
            self.system.on_arrival.append(self.autoscaling.arrived)
        self.clients = _clients(plan, env, self.system, for_workload, for_clients)
        self.system.on_finish.append(self.columns.add)
        if self.prefix_reuse is not None:
            self.system.on_finish.append(self.prefix_reuse.add)
        self.system.on_finish.append(self.clients.finished)
        if watch is None and (self.shed is None or self._retries is None):
            _foresee(plan, self.system, self.clients)

    def run(self) -> Run:
        """Run until every request is answered.

        Raises:
            BadInput: a request does not fit into an engine's KV memory, even alone.
            AssertionError: requests were lost or blocks leaked, which is an error of the simulator.
        """
        with paused_garbage_collection():  # it takes a tenth of a run and finds nothing: a run drops no cycles
            self.environment.run()
        system, clients = self.system, self.clients
        finished, shed = len(self.columns.arrival), 0 if self.shed is None else len(self.shed.ended)
        requests = self.plan.requests
        if isinstance(clients, SessionClients) and clients.until < inf:
            requests = clients.sent
        if finished + shed != requests:
            expected = f"expected {requests} finished or shed requests"
            raise AssertionError(f"{expected}, found {finished} and {shed}")
        for engine in system.engines:
            engine.check_is_empty()
        self.columns.flush()
        links = dict(system.links)
        if len(set(map(id, links.values()))) < len(links):
            links = {"shared": next(iter(links.values()))}
        return Run(
            self.columns, system.engines, links, self.population.area, self.plan.outside(),
            clients.log if isinstance(clients, SessionClients) else None, self.prefix_reuse,
            None if self.autoscaling is None else self.autoscaling.logs, self.shed,
        )  # fmt: skip

    def _shed(self, record: RequestRecord, shed: RequestShed) -> None:
        log, now, retries = self.shed, self.environment.now, self._retries
        assert log is not None, "engines shed requests only with admission control"
        log.reasons[shed.reason] += 1
        if retries is not None and record.retries < retries.attempts:
            record.retries += 1
            log.retries += 1
            # the wait is drawn evenly between what the engine says and (1 + jitter) times that
            self.system.submit_again(record, shed.retry_after * (1 + retries.jitter * float(self._rng.random())))
            return
        self.population.set(now, self.population.value - 1)
        log.add(record, now)
        self.clients.finished(record)

    def _keep_steps(self) -> None:
        self._keep(engine.log for engine in self.system.engines)


def realisation(plan: ServingPlan, replication: int) -> list[tuple[Request, int]]:
    """The requests of a replication, each with its answer's length in tokens; `BadInput` if they depend on answers."""
    if not isinstance(plan.workload, Workload):
        raise BadInput("expected none: requests are listed before any is answered", field="workload.sessions")
    return list(plan.workload.requests(plan.generators(replication)[0], plan.requests))


def realised_sessions(plan: ServingPlan, replication: int) -> list[Session]:
    """The sessions of a replication, whose rounds have not begun. The plan's workload has sessions."""
    assert not isinstance(plan.workload, Workload)
    return list(plan.workload.sessions(plan.generators(replication)[0], plan.requests))


def _clients(
    plan: ServingPlan,
    env: Environment,
    system: System,
    for_workload: np.random.Generator,
    for_clients: np.random.Generator,
) -> OpenLoop | ClosedLoop | SessionClients:
    workload, spec = plan.workload, plan.scenario.workload.arrivals
    if isinstance(workload, Workload):
        requests = workload.requests(for_workload, plan.requests)
        if isinstance(spec, ClosedLoopSpec):
            clients = min(spec.concurrency, plan.requests)  # others find no request left
            return ClosedLoop(env, system, requests, clients, spec.pauses(for_clients))
        return OpenLoop(env, system, requests, max(map(len, plan.groups)))
    sessions, log = workload.sessions(for_workload, plan.requests), SessionLog(detail=bool(plan.scenario.detail))
    if isinstance(spec, ClosedLoopSpec):
        users = min(spec.concurrency, plan.requests)
        until = inf if spec.duration is None else spec.duration
        return SessionClients(env, system, sessions, log, users, spec.pauses(for_clients), until)
    return SessionClients(env, system, sessions, log)


def _foresee(plan: ServingPlan, system: System, clients: OpenLoop | ClosedLoop | SessionClients) -> None:
    """Let engines visit step ends early where nothing can come in between: no failure, no transfer,
    no request that follows an answer or is sent again, and none that is still being routed.

    An engine that several routers choose is left out, too, and one whose prefixes are loaded from tiers. An autoscaler
    looks at engines at any time.
    """
    routed_later = plan.scenario.system.frontend.route > 0
    if not isinstance(clients, OpenLoop) or plan.scenario.failures or system.decode_pools or routed_later:
        return
    if plan.scenario.system.autoscaling or any(engine.tier_links is not None for engine in system.engines):
        return
    pools = system.pools
    if sum(len(pool.engines) for pool in pools) == len(system.engines):
        for pool in pools:
            pool.foresee(clients.time_after)


def _cache_sizes(system: System) -> dict[str, int]:
    """Prefix ids that the caches which prompts are looked up in can hold: on devices, and in all tiers together."""
    engines = {engine.name: engine for pool in system.prefill_pools.values() for engine in pool.engines}.values()
    device = in_all = 0
    for engine in engines:
        on_device = sum(core.kv_cache.num_blocks // core.kv_cache.blocks_per_node for core in engine.cores)
        device += on_device
        in_all += on_device + (sum(engine.tier_links.capacities) * len(engine.cores) if engine.tier_links else 0)
    return {"device": device} | ({"all": in_all} if in_all > device else {})
