"""The parts that topologies are made of: engines of a plan, grouped behind routers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from latency_models.step_time import StepTime
from scenarios.serving import ServingScenario
from schedulers.routing import ROUTERS
from twin.environment import Environment
from twin.serving.engine import Engine, Watch
from twin.serving.machine_speed import MachineSpeed
from twin.serving.plan import ServingPlan
from twin.serving.pools import EnginesByModel, PlannedPool
from twin.serving.randomness import Draw, scores_of
from twin.serving.system import Pool


@dataclass(frozen=True)
class EngineParts:
    """The settings and step times of one engine of a plan.

    Attributes:
        name: the engine's. index: its number among all engines of the plan. pool: at the scores of a draw.
    """

    name: str
    index: int
    pool: PlannedPool
    step_time: StepTime
    scenario: ServingScenario

    def make(self, env: Environment, watch: Watch | None = None, machine_speed: MachineSpeed | None = None) -> Engine:
        """The engine, in an environment."""
        return Engine(
            env, self.pool.make_core, self.step_time, name=self.name, index=self.index,
            depth=self.pool.scheduler.depth, fast_forward=self.scenario.fast_forward,
            detail=self.scenario.detail is True, watch=watch, machine_speed=machine_speed,
        )  # fmt: skip


def engine_parts(plan: ServingPlan, draw: Draw) -> list[EngineParts]:
    """The parts of every engine of a plan, in the order of its pools, with what is not known at a draw."""
    varied = dict[int, StepTime]()
    scores = scores_of(plan.unknowns() if draw is not None else (), plan.scenario.seed, draw)
    found: list[EngineParts] = []
    for planned in plan.pools:
        pool = planned.at(scores) if scores else planned
        step_time = varied.setdefault(id(planned.step_time), pool.step_time)  # pools of one model share its draw
        found += [
            EngineParts(name, len(found) + i, pool, step_time, plan.scenario) for i, name in enumerate(pool.names)
        ]
    return found


@dataclass
class Parts:
    """Makes the engines and pools of one simulation.

    Attributes:
        plan: of the simulation. env: its environment. rng: for routers that draw.
        draw, watch, machine_speed: as in `Simulation`.
        engines: those made so far, by name.
    """

    plan: ServingPlan
    env: Environment
    rng: np.random.Generator
    draw: Draw = None
    watch: Watch | None = None
    machine_speed: MachineSpeed | None = None
    engines: dict[str, Engine] = field(default_factory=dict)

    def make_engines(self) -> None:
        """Make every engine of the plan, in the order of its pools."""
        for parts in engine_parts(self.plan, self.draw):
            self.engines[parts.name] = parts.make(self.env, self.watch, self.machine_speed)

    def make_pools(self, engines: EnginesByModel) -> dict[str, Pool]:
        """A pool of engines for each model, with a router of its own; models with the same engines share one."""
        make_router = ROUTERS.select(self.plan.scenario.system.routing)
        made: dict[tuple[str, ...], Pool] = {}
        for names in engines.values():
            if names not in made:
                made[names] = Pool([self.engines[name] for name in names], make_router(self._draw_below))
        return {model: made[names] for model, names in engines.items()}

    @functools.cached_property
    def _draw_below(self) -> functools.partial[int]:
        return functools.partial(_whole, self.rng)


def _whole(rng: np.random.Generator, size: int) -> int:
    return int(rng.integers(size))
