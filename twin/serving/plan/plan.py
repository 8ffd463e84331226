"""The plan of a run: a checked scenario turned into a workload, an engine configuration and step times.

Every input error is raised here, before a simulation starts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from latency_models.step_time import StepTime, Unknown, draw_scores
from scenarios.engine import SchedulerPlan, router_name
from scenarios.serving import ClosedLoopSpec, ReplaySpec, ServingScenario
from schedulers.routing import draws
from twin.serving.plan.pools import EnginesByModel, PlannedPool, describe_devices, engines_by_model, plan_pools
from workloads.arrivals import Replay
from workloads.errors import BadInput
from workloads.generator import Workload

if TYPE_CHECKING:
    from workloads.recorded_sessions import RecordedSessions
    from workloads.sessions import DrawnSessions
    from workloads.trace import Trace

LENGTHS_DRAWN = 1000
"""Requests whose lengths are drawn for `ServingPlan.mean_lengths`."""

ASSUMED_LENGTHS = (1000.0, 250.0)

STEP_TIME = "step_time"
"""The name of the random part that `--draws` varies, beside those that replications vary."""

Draw: TypeAlias = int | tuple[str, float] | None
"""The number of a draw of all unknowns; one unknown's name and score, the others at their estimates; None: all at
their estimates."""

AnyWorkload: TypeAlias = "Workload | DrawnSessions | RecordedSessions"

PLAYED_ONCE = (
    "which come once and in order, since their prompts have prefix ids and one that came again would be found in the "
    "cache (workload.trace.pairing: independent draws lengths alone)"
)


@dataclass(frozen=True)
class ServingPlan:
    """Everything that a run needs.

    Attributes:
        pools: engines that are alike, those that prefill first.
        trace_digest: a digest of the trace's content; None without a trace.
        replayed: numbers of rows replayed and recorded, and the time spans of both in seconds at the replayed speed;
            None where no trace is replayed.
        file: the scenario's, for errors of a run; None if it is not known.
    """

    scenario: ServingScenario
    base: Path
    workload: AnyWorkload
    requests: int
    pools: list[PlannedPool]
    trace_name: str | None
    trace_digest: str | None
    replayed: dict[str, float] | None
    file: Path | None = None

    @property
    def scheduler(self) -> SchedulerPlan:
        """The plan of the schedulers of the first pool, which is the only pool of many systems."""
        return self.pools[0].scheduler

    @property
    def step_time(self) -> StepTime:
        """The step times of the first pool."""
        return self.pools[0].step_time

    @property
    def clients(self) -> tuple[tuple[str, str], ...]:
        """See `Workload.clients`; turns of sessions have neither class nor tenant."""
        return self.workload.clients if isinstance(self.workload, Workload) else ()

    @cached_property
    def prefill_engines(self) -> EnginesByModel:
        """The engines that a model's requests go to first. Those of a colocated system decode, too."""
        return engines_by_model(pool for pool in self.pools if pool.spec.role != "decode")

    @cached_property
    def decode_engines(self) -> EnginesByModel:
        """The engines that decode a model's requests after a transfer; empty in a colocated system."""
        return engines_by_model(pool for pool in self.pools if pool.spec.role == "decode")

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """Engines that a router chooses among, one tuple for each router."""
        return list(dict.fromkeys((*self.prefill_engines.values(), *self.decode_engines.values())))

    @cached_property
    def mean_lengths(self) -> tuple[float, float]:
        """Mean prompt and output tokens of the first requests; of sessions, which are not drawn for it, assumed."""
        if not isinstance(self.workload, Workload):
            return ASSUMED_LENGTHS
        size = min(self.requests, LENGTHS_DRAWN)
        requests = list(self.workload.requests(np.random.default_rng(self.scenario.seed), size))
        prompts = sum(request.prompt_tokens for request, _ in requests)
        return prompts / size, sum(answer for _, answer in requests) / size

    def with_step_time(self, step_time: StepTime) -> ServingPlan:
        """The same plan with other step times in every pool."""
        return replace(self, pools=[replace(pool, step_time=step_time) for pool in self.pools])

    def for_one_run(self) -> ServingPlan:
        """The same plan with copies of its step-time models, since a model remembers what lay beyond its measurements.

        Pools that share a model share its copy.
        """
        copies = copy.deepcopy([pool.step_time for pool in self.pools])
        pools = [replace(pool, step_time=step_time) for pool, step_time in zip(self.pools, copies, strict=True)]
        return replace(self, pools=pools)

    def generators(self, replication: int) -> list[np.random.Generator]:
        """Random generators for the workload, for routing and for clients."""
        seeds = np.random.SeedSequence([self.scenario.seed, replication])
        return [np.random.default_rng(seed) for seed in seeds.spawn(3)]

    @cached_property
    def random(self) -> tuple[str, ...]:
        """Names of the parts that differ between replications: parts of the workload, `routing`, `think_times` and
        `speculation`. Empty if all replications are the same run.
        """
        arrivals, routing = self.scenario.workload.arrivals, self.scenario.system.routing
        parts = {
            "routing": max(map(len, self.groups)) > 1 and draws(router_name(routing)),
            "think_times": isinstance(arrivals, ClosedLoopSpec) and bool(arrivals.think and arrivals.think_cv),
            "speculation": any(pool.engine.speculative_config for pool in self.scenario.pools),
        }
        return tuple(dict.fromkeys((*self.workload.random, *(name for name, random in parts.items() if random))))

    def unknowns(self) -> tuple[Unknown, ...]:
        """Unknowns of all pools; one entry for each name. Empty if no step-time model has any."""
        if not self.can_draw:
            return ()
        unknowns = {unknown.name: unknown for pool in self.pools for unknown in pool.unknowns()}
        return tuple(unknowns.values())

    @property
    def can_draw(self) -> bool:
        """True if the step-time model of a pool has unknowns to draw; they are not computed."""
        return any(pool.step_time.can_draw for pool in self.pools)

    def outside(self) -> dict[str, float]:
        """Axes on which steps of any pool lay beyond its measurements so far, with the largest value on each."""
        return widest(pool.step_time.outside() for pool in self.pools)


def widest(outsides: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest value on each axis, by name."""
    maxima: dict[str, float] = {}
    for outside in outsides:
        for axis, value in outside.items():
            maxima[axis] = max(value, maxima.get(axis, value))
    return dict(sorted(maxima.items()))


def scores_of(unknowns: Iterable[Unknown], seed: int, draw: int | tuple[str, float]) -> dict[str, float]:
    """The scores of a draw."""
    if isinstance(draw, int):
        return draw_scores(unknowns, np.random.default_rng([seed, draw, 1]))
    name, score = draw
    return {name: score}


def make_plan(
    scenario: ServingScenario,
    base: Path,
    trace: Trace | None,
    step_times: dict[str, StepTime] | None = None,
    file: Path | None = None,
) -> ServingPlan:
    """Build the plan of a scenario; `BadInput` for a field that cannot be used. Relative paths start from `base`.

    `step_times`: models by their sections as JSON, shared by the plans of a sweep, so that equal ones are read and
    fitted once. `file`: the scenario's, for errors.
    """
    workload = scenario.workload.build(trace)
    pools = plan_pools(scenario, base, workload.prefix_block_tokens, {} if step_times is None else step_times)
    requests = scenario.workload.count(trace)
    if workload.recorded is not None and requests > workload.recorded:
        why = "which replay plays once" if isinstance(scenario.workload.arrivals, ReplaySpec) else PLAYED_ONCE
        if scenario.workload.sessions is not None:
            why = "whose sessions are played once"
        expected = f"expected at most the {workload.recorded} rows of the trace, {why}"
        raise BadInput(expected, field="workload.requests", value=requests)
    names = dict.fromkeys(name for pool in pools for name in pool.names)
    for i, failure in enumerate(scenario.failures):
        if failure.engine not in names:
            raise BadInput(f"expected one of {', '.join(names)}", field=f"failures.{i}.engine", value=failure.engine)
    replayed = None
    if isinstance(workload.arrivals, Replay):
        times = workload.arrivals.recorded
        seconds, recorded = float(times[requests - 1] - times[0]), float(times[-1] - times[0])
        replayed = {"requests": requests, "rows": len(times), "seconds": seconds, "recorded_seconds": recorded}
    return ServingPlan(
        scenario, base, workload, requests, pools, trace.name if trace else None, trace.digest if trace else None,
        replayed, file,
    )  # fmt: skip


def describe(plan: ServingPlan) -> dict[str, Any]:
    """The plan's fields in a manifest and in a document."""
    pools = [pool.describe() for pool in plan.pools]
    return {
        "scenario": plan.scenario.model_dump(mode="json", by_alias=True),
        "requests": plan.requests,
        "num_gpu_blocks": pools[0]["num_gpu_blocks"],
        "step_time": pools[0]["step_time"],
        "pools": pools,
        "devices": describe_devices(plan.pools),
        "trace": plan.trace_name,
        "random": [*plan.random, *([STEP_TIME] if plan.can_draw else [])],
        "replayed": plan.replayed,
    }
