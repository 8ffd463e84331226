"""Engines that do not affect each other, simulated one after another.

Behind a router that takes turns, an engine's requests depend on nothing that other engines do; and pools that serve
different models do not depend on each other while their routers look at loads alone. Such a group of engines has a
simulation of its own. All groups are given their requests of the same span of arrivals, and one group runs through the
span after the other, with its data in the processor's caches. Groups may be shared among processes, too, each of which
makes the whole workload and plays its own groups' requests.

Records are equal, to the last bit, to those of one simulation of all engines
(`tests/parity/test_independent_engines.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.engine import make_router, router_name
from scenarios.serving import ClosedLoopSpec
from scenarios.system import FrontendSpec
from schedulers.routing import Router, own_method
from twin.environment import Alarm, Environment, Priority
from twin.process import paused_garbage_collection
from twin.serving.engine.engine import Engine
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.records.engine_log import StepFile, StepKeeper, numbers
from twin.serving.records.requests import Columns, RequestRecord, Sink
from twin.serving.results.summary import AnyEngine, Run
from twin.serving.system.system import Pool, System
from twin.serving.system.topologies import EngineParts, engine_parts
from workloads.generator import Workload
from workloads.request import TASKS, Request

SPAN = 1 << 15
"""Requests that are drawn at a time, of all engines together: some 10 MB."""

Rows = dict[str, NDArray[Any]]
"""Columns of finished requests; see `Columns.take`."""


def why_together(plan: ServingPlan) -> str | None:
    """The reason why one simulation has to have all engines of a plan: what they share; None if nothing."""
    return next((f"{field}: {reason}" for shared, field, reason in _shared(plan) if shared), None)


def _shared(plan: ServingPlan) -> Iterator[tuple[bool, str, str]]:
    """The things that engines may share: whether they do, the field that says so, and what it is."""
    scenario, groups = plan.scenario, plan.groups
    system, arrivals, engines = scenario.system, scenario.workload.arrivals, sum(map(len, groups))
    yield engines == 1, "system", "there is one engine"
    yield not isinstance(plan.workload, Workload), "workload.sessions", "a turn waits for the answer before it"
    yield isinstance(arrivals, ClosedLoopSpec), "workload.arrivals", "clients of a closed loop wait for answers"
    yield bool(scenario.failures), "failures", "requests of an engine that fails go to others"
    yield system.topology != "colocated", "system.layout", f"{system.layout} engines send requests to each other"
    distinct = len({name for group in groups for name in group})
    yield engines > distinct, "system.pools", "models share engines, each with a router of its own"
    tiers = any(pool.spec.engine.kv_offloading is not None for pool in plan.pools)
    yield tiers, "engine.kv_offloading", "engines of a host share its tiers"
    drafts = any(pool.scheduler.speculation is not None for pool in plan.pools)
    yield drafts, "engine.speculative_config", "outcomes of drafts are reported of all engines"
    pipelines = any(pool.scheduler.stages is not None for pool in plan.pools)
    yield pipelines, "engine.pipeline_parallel_size", "work of stages is reported of all engines"
    sheds = any(pool.scheduler.config.admission_control is not None for pool in plan.pools)
    yield sheds, "engine.admission_control", "requests that are shed may be sent again, to another engine"
    yield scenario.measure.prefix_cache, "measure.prefix_cache", "prompts of all engines are followed"
    yield system.kv_events is not None, "system.kv_events", "routers follow all caches"
    yield bool(system.autoscaling), "system.autoscaling", "the number of engines follows the load of all"
    yield system.frontend != FrontendSpec(), "system.frontend", "requests take time on their way to engines and back"
    router, name = _router(plan), router_name(system.routing)
    by_loads, by_turns = own_method(router, "requests_elsewhere"), own_method(router, "turn_of")
    yield len(groups) > 1 and by_loads is None, "system.routing", f"{name} may look at more than the loads of its pool"
    yield len(groups) == 1 and by_turns is None, "system.routing", f"{name} looks at all engines for each request"


def independent_groups(plan: ServingPlan) -> list[tuple[str, ...]]:
    """The smallest groups of engines that do not affect each other, by name; one group where engines share something.

    They are in the order of the plan's groups, each of which is taken apart or kept whole.
    """
    if why_together(plan) is not None:
        return [tuple(name for pool in plan.pools for name in pool.names)]
    router = _router(plan)
    apart = own_method(router, "turn_of") is not None
    return [part for group in plan.groups for part in ([(name,) for name in group] if apart else [group])]


def simulate_apart(plan: ServingPlan, replication: int = 0, draw: Draw = None, sink: Sink | None = None) -> Run:
    """Run a plan whose engines are in several `independent_groups`, one group after the other in this process."""
    share = IndependentEngines(plan, replication, draw)
    return merged_run(plan, share.finished_parts(), sink, share.engines.values)


class IndependentEngines:
    """One process's share of a run whose engines are in several `independent_groups`.

    Args:
        plan, replication, draw: as of `Simulation`.
        share, shares: this process simulates every `shares`-th group, from number `share` on.
        file: for steps that are no longer needed in memory.

    Attributes:
        engines: of this share by name, in their states at the end once `finished_parts` is through.
    """

    def __init__(
        self,
        plan: ServingPlan,
        replication: int,
        draw: Draw,
        share: int = 0,
        shares: int = 1,
        file: Callable[[], StepFile] = StepFile,
    ) -> None:
        self.plan = plan
        self._columns = empty_columns(plan, detail=True)
        assert isinstance(plan.workload, Workload), "turns of sessions depend on answers"
        self._requests = plan.workload.requests(plan.generators(replication)[0], plan.requests)
        self._keep = StepKeeper(file)
        groups = independent_groups(plan)
        parts = {part.name: part for part in engine_parts(plan, draw)}
        self.engines: dict[str, Engine] = {}
        self._groups: list[_Group | None] = [None] * len(groups)
        for number in range(share, len(groups), shares):
            group = self._groups[number] = _Group(plan, [parts[name] for name in groups[number]], self._columns.add)
            self.engines |= {engine.name: engine for engine in group.engines}
        self._router = _GroupRouter(plan, groups)
        self._sent = 0

    def finished_parts(self) -> Iterator[Rows]:
        """Simulate; yields the requests that finish in each span of arrivals, in order, and then the rest.

        The spans are those of all shares. Errors are those of `Simulation.run`.
        """
        finished = 0
        with paused_garbage_collection():
            for until, arrivals in self._spans():
                for group, requests in zip(self._groups, arrivals, strict=True):
                    if group is not None:
                        group.play(requests, until)
                yield (rows := self._take())
                finished += len(rows["id"])
            for group in self._groups:
                if group is not None:
                    group.env.run()
            yield (rows := self._take())
        finished += len(rows["id"])
        if finished != self._sent:
            raise AssertionError(f"expected {self._sent} finished requests, found {finished}")
        for engine in self.engines.values():
            engine.check_is_empty()

    def _spans(self) -> Iterator[tuple[float, list[list[tuple[Request, int]]]]]:
        """Spans of arrivals: the last arrival of each, seconds, and the requests of each group, with their answers."""
        groups, group_of = self._groups, self._router.group_of
        while requests := list(islice(self._requests, SPAN)):
            arrivals: list[list[tuple[Request, int]]] = [[] for _ in groups]
            for pair in requests:
                number = group_of(pair[0])
                if groups[number] is not None:
                    arrivals[number].append(pair)
            self._sent += sum(map(len, arrivals))
            yield requests[-1][0].arrival, arrivals

    def _take(self) -> Rows:
        """The requests finished since the last call, in the order in which one simulation of all finishes them."""
        self._keep(engine.log for engine in self.engines.values())
        return in_order(self._columns.take())


def empty_columns(plan: ServingPlan, *, detail: bool, sink: Sink | None = None) -> Columns:
    """Columns for the finished requests of a plan that number models and engines alike in all processes."""
    columns = Columns(detail=detail, sink=sink, clients=plan.clients)
    columns.kinds = {kind: i for i, kind in enumerate(product(plan.prefill_engines, TASKS))}
    columns.replicas = {name: i for i, name in enumerate(name for pool in plan.pools for name in pool.names)}
    return columns


def in_order(rows: Rows) -> Rows:
    """Finished requests in the order of time, and of their engines in the plan at the same instant.

    Those of an engine at one instant stay as they are.
    """
    order = np.lexsort((rows["replica"], rows["last_token"]))
    return {name: column[order] for name, column in rows.items()}


def merged_run(
    plan: ServingPlan,
    parts: Iterable[Rows],
    sink: Sink | None,
    at_end: Callable[[], Iterable[AnyEngine]],
    outside: dict[str, float] | None = None,
) -> Run:
    """The run of a plan whose finished requests come in parts, in order.

    Args:
        sink: as of `Simulation`. at_end: called when all have come; gives all engines of the plan.
        outside: as of `Run`; None: as the plan has it then.
    """
    columns = empty_columns(plan, detail=bool(plan.scenario.detail), sink=sink)
    for rows in parts:
        columns.extend(rows)
    columns.flush()
    by_name = {engine.name: engine for engine in at_end()}
    engines = [by_name[name] for group in plan.groups for name in group]
    return Run(columns, engines, {}, population(columns), plan.outside() if outside is None else outside)


def population(columns: Columns) -> float:
    """∫ requests in the system dt, from arrivals and departures, summed in the order of a simulation."""
    arrivals, departures = np.sort(numbers(columns.arrival)), numbers(columns.last_token)
    area, since, count, come, departed = 0.0, 0.0, 0, 0, 0
    while departed < len(departures):
        until = departures[min(departed + SPAN, len(departures)) - 1]
        to_come, to_go = (int(np.searchsorted(times, until, side="right")) for times in (arrivals, departures))
        times = np.concatenate((arrivals[come:to_come], departures[departed:to_go]))
        order = np.argsort(times, kind="stable")  # arrivals first: the count is that of a simulation
        times, changes = times[order], np.where(order < to_come - come, 1, -1)
        before = count + np.cumsum(changes) - changes
        area = float(np.cumsum(np.concatenate(([area], before * np.diff(times, prepend=since))))[-1])
        since, count, come, departed = float(times[-1]), count + int(changes.sum()), to_come, to_go
    return area


class _Group:
    """Engines behind one router, in an environment of their own."""

    def __init__(self, plan: ServingPlan, parts: list[EngineParts], keep: Callable[[RequestRecord], None]) -> None:
        self.env = Environment()
        self.engines = [part.make(self.env) for part in parts]
        names = {part.name for part in parts}
        pool = Pool(self.engines, _router(plan))
        models = [model for model, group in plan.prefill_engines.items() if names.issubset(group)]
        self._system = System(self.env, dict.fromkeys(models, pool), {}, {})
        self._system.on_finish.append(keep)
        self._alarm = Alarm(Priority.ARRIVAL, _never)

    def play(self, requests: Iterable[tuple[Request, int]], until: float) -> None:
        """Send requests at their arrival times, and run up to the time `until`, before which no others arrive."""
        run_to, submit, alarm = self.env.run_to, self._system.submit, self._alarm
        for request, answer_tokens in requests:
            run_to(alarm, request.arrival)
            submit(RequestRecord(request, answer_tokens))
        run_to(alarm, until)


def _never(now: float) -> None:
    raise AssertionError("the alarm marks how far to run, and does not ring")


class _GroupRouter:
    """Finds the group that gets each request, in order of arrival."""

    def __init__(self, plan: ServingPlan, groups: list[tuple[str, ...]]) -> None:
        self._turn_of = own_method(_router(plan), "turn_of") if len(groups) > len(plan.groups) else None
        number_of = {name: number for number, group in enumerate(groups) for name in group}
        routed = {group: [0, number_of[group[0]], len(group)] for group in plan.groups}
        # Requests so far, the number of the first group, and the number of engines, by model.
        self._routed = {model: routed[group] for model, group in plan.prefill_engines.items()}

    def group_of(self, request: Request) -> int:
        """The number of the group that gets the next request."""
        routed = self._routed[request.model]
        if self._turn_of is None:
            return routed[1]
        number, first, size = routed
        routed[0] = number + 1
        return first + int(self._turn_of(number, size))


def _router(plan: ServingPlan) -> Router:
    """A router of the plan's kind. Those of independent groups draw nothing."""
    return make_router(plan.scenario.system.routing, lambda size: 0)
