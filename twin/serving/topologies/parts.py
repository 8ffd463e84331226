"""The parts that topologies are made of: engines of a plan, grouped behind routers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from latency_models.step_time import StepTime
from schedulers.routing import ROUTERS
from twin.environment import Environment
from twin.serving.engine import Engine, Watch
from twin.serving.machine_speed import MachineSpeed
from twin.serving.plan import ServingPlan
from twin.serving.pools import EnginesByModel
from twin.serving.randomness import Draw, scores_of
from twin.serving.system import Pool


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
        scenario, varied = self.plan.scenario, dict[int, StepTime]()
        scores = scores_of(self.plan.unknowns() if self.draw is not None else (), scenario.seed, self.draw)
        for planned in self.plan.pools:
            pool = planned.at(scores) if scores else planned
            step_time = varied.setdefault(id(planned.step_time), pool.step_time)  # pools of one model share its draw
            for name in pool.names:
                self.engines[name] = Engine(
                    self.env, pool.make_core, step_time, name=name, index=len(self.engines),
                    depth=pool.scheduler.depth, fast_forward=scenario.fast_forward, detail=scenario.detail is True,
                    watch=self.watch, machine_speed=self.machine_speed,
                    deliver=scenario.system.frontend.deliver,
                )  # fmt: skip

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
