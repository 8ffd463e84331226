"""The parts that topologies are made of: engines of a plan, grouped behind routers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np

from latency_models.step_time import StepTime
from scenarios.routing import make_router
from schedulers.kv_events import CacheView
from twin.environment import Environment
from twin.serving.engine import Engine, Watch
from twin.serving.machine_speed import MachineSpeed
from twin.serving.plan import ServingPlan
from twin.serving.pools import EnginesByModel, PlannedPool
from twin.serving.randomness import Draw, scores_of
from twin.serving.system import Pool
from twin.serving.tier_links import CopyLink, TierLinks


@dataclass
class Parts:
    """Makes the engines and pools of one simulation.

    Attributes:
        plan: of the simulation. env: its environment. rng: for routers that draw.
        draw, watch, machine_speed: as in `Simulation`. speculation_seed: for the outcomes of drafts.
        engines: those made so far, by name.
    """

    plan: ServingPlan
    env: Environment
    rng: np.random.Generator
    draw: Draw = None
    watch: Watch | None = None
    machine_speed: MachineSpeed | None = None
    engines: dict[str, Engine] = field(default_factory=dict)
    speculation_seed: int = 0
    _load_links: dict[tuple[str, int], list[CopyLink]] = field(default_factory=dict)

    def make_engines(self) -> None:
        """Make every engine of the plan, in the order of its pools."""
        scenario, varied = self.plan.scenario, dict[int, StepTime]()
        scores = scores_of(self.plan.unknowns() if self.draw is not None else (), scenario.seed, self.draw)
        for planned in self.plan.pools:
            pool = planned.at(scores) if scores else planned
            step_time = varied.setdefault(id(planned.step_time), pool.step_time)  # pools of one model share its draw
            for i, name in enumerate(pool.names):
                links = self._tier_links(pool, i)
                self.engines[name] = Engine(
                    self.env, pool.make_core, step_time, name=name, index=len(self.engines),
                    depth=pool.scheduler.depth, fast_forward=scenario.fast_forward, detail=scenario.detail is True,
                    watch=self.watch, machine_speed=self.machine_speed, view=self._view(pool),
                    tier_links=links, speculation=pool.make_speculation(self.speculation_seed),
                )  # fmt: skip

    def _view(self, pool: PlannedPool) -> CacheView | None:
        """The view that routers have of the cache of an engine of a pool; None: the cache itself."""
        events = self.plan.scenario.system.kv_events
        return None if events is None else CacheView(pool.scheduler.config.prefix_id_tokens, events.delay)

    def _tier_links(self, pool: PlannedPool, number: int) -> TierLinks | None:
        """Links to the tiers of an engine, given its number in its pool; the engines of a host share those to load."""
        spec = pool.spec.engine.kv_offloading
        if spec is None:
            return None
        host = pool.spec.name, number // spec.engines_per_host
        tiers = spec.tiers.values()
        if host not in self._load_links:
            self._load_links[host] = [CopyLink(tier.bandwidth, tier.latency) for tier in tiers]
        stores = [CopyLink(tier.bandwidth, tier.latency) for tier in tiers]
        config = pool.scheduler.config
        assert config.kv_offloading is not None, "the scheduler has the tiers that its section describes"
        capacities, size = [tier.capacity for tier in config.kv_offloading.tiers], config.prefix_id_tokens
        node_bytes = spec.bytes_per_token * size
        return TierLinks(list(spec.tiers), self._load_links[host], stores, capacities, size, node_bytes)

    def make_pools(self, engines: EnginesByModel) -> dict[str, Pool]:
        """A pool of engines for each model, with a router of its own; models with the same engines share one."""
        routing = self.plan.scenario.system.routing
        made: dict[tuple[str, ...], Pool] = {}
        for names in engines.values():
            if names not in made:
                made[names] = Pool([self.engines[name] for name in names], make_router(routing, self._draw_below))
        return {model: made[names] for model, names in engines.items()}

    @functools.cached_property
    def _draw_below(self) -> functools.partial[int]:
        return functools.partial(_whole, self.rng)


def _whole(rng: np.random.Generator, size: int) -> int:
    return int(rng.integers(size))
