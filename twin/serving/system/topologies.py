"""Topologies, which make systems of pools, routers and links, by the name that a `system` section has for them.

A plug-in adds one with a layout of its own: a subclass of `scenarios.system.SystemSpec` in `LAYOUTS`, and here a
function that builds a system from the parts (`SystemSpec.topology`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from latency_models.step_time import ANY_SEQUENCE, StepTime
from scenarios.engine import make_router
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.router_views import CacheView
from twin.environment import Environment
from twin.serving.engine.engine import Engine
from twin.serving.engine.engine_state import EngineOptions, Watch
from twin.serving.engine.links import CopyLink, Link, LinkSpeed, TierLinks
from twin.serving.engine.pipelined_engine import PipelinedEngine
from twin.serving.engine.speculation import SimulatedSpeculation
from twin.serving.plan.plan import Draw, ServingPlan, scores_of
from twin.serving.plan.pools import EnginesByModel, PlannedPool
from twin.serving.system.system import Pool, System
from workloads.registry import Registry

if TYPE_CHECKING:
    from scenarios.memory import KVOffloadingSpec


@dataclass(frozen=True)
class EngineParts:
    """The settings and step times of one engine of a plan.

    Attributes:
        name: the engine's. index: its number among all engines of the plan. number: in its pool.
        pool: at the scores of a draw.
    """

    name: str
    index: int
    number: int
    pool: PlannedPool
    step_time: StepTime
    plan: ServingPlan

    def make(
        self,
        env: Environment,
        watch: Watch | None = None,
        *,
        view: CacheView | None = None,
        tier_links: TierLinks | None = None,
        speculation: SimulatedSpeculation | None = None,
    ) -> Engine:
        scenario, pool, step_time = self.plan.scenario, self.pool, self.step_time
        stages = pool.scheduler.stages
        options = EngineOptions(
            self.name, self.index, pool.scheduler.depth, scenario.fast_forward and stages is None,
            scenario.detail is True, watch, speculation, view, tier_links, scenario.system.frontend.deliver,
        )  # fmt: skip
        engine: Engine = (
            Engine(env, pool.make_core, step_time, options)
            if stages is None
            else PipelinedEngine(env, pool.make_pipeline, step_time, stages, options)
        )
        engine.find_speed = lambda: engine_speed(pool, step_time, *self.plan.mean_lengths)
        return engine


def engine_parts(plan: ServingPlan, draw: Draw) -> list[EngineParts]:
    """The parts of every engine of a plan, in the order of its pools, with what is not known at a draw."""
    varied = dict[int, StepTime]()
    scores = {} if draw is None else scores_of(plan.unknowns(), plan.scenario.seed, draw)
    parts: list[EngineParts] = []
    for planned in plan.pools:
        pool = planned.at(scores) if scores else planned
        step_time = varied.setdefault(id(planned.step_time), pool.step_time)  # pools of one model share its draw
        for i, name in enumerate(pool.names):
            parts.append(EngineParts(name, len(parts), i, pool, step_time, plan))
    return parts


@dataclass
class Parts:
    """Makes the engines and pools of one simulation.

    Attributes:
        plan: of the simulation. env: its environment. rng: for routers that draw.
        draw, watch: as in `Simulation`. speculation_seed: for the outcomes of drafts.
        drafts: as in `Simulation`.
        engines: those made so far, by name.
    """

    plan: ServingPlan
    env: Environment
    rng: np.random.Generator
    draw: Draw = None
    watch: Watch | None = None
    engines: dict[str, Engine] = field(default_factory=dict)
    speculation_seed: int = 0
    drafts: int = 0
    _load_links: dict[tuple[str, int], list[CopyLink]] = field(default_factory=dict)

    def make_engines(self) -> None:
        """Make every engine of the plan, in the order of its pools."""
        events = self.plan.scenario.system.kv_events
        for parts in engine_parts(self.plan, self.draw):
            pool = parts.pool
            # Routers see the cache itself where there are no events.
            view = None if events is None else CacheView(pool.scheduler.config.prefix_id_tokens, events.delay)
            tiers, drafts = pool.spec.engine.kv_offloading, pool.scheduler.speculation
            self.engines[parts.name] = parts.make(
                self.env, self.watch, view=view,
                tier_links=None if tiers is None else self._tier_links(tiers, pool, parts.number),
                speculation=None if drafts is None else pool.make_speculation(self.speculation_seed, self.drafts),
            )  # fmt: skip

    def _tier_links(self, spec: KVOffloadingSpec, pool: PlannedPool, number: int) -> TierLinks:
        """Links to the tiers of an engine, given its number in its pool; the engines of a host share those to load."""
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
        routing, rng = self.plan.scenario.system.routing, self.rng

        def draw(size: int) -> int:
            return int(rng.integers(size))

        pools: dict[tuple[str, ...], Pool] = {}
        for names in engines.values():
            if names not in pools:
                pools[names] = Pool([self.engines[name] for name in names], make_router(routing, draw))
        return {model: pools[names] for model, names in engines.items()}


def engine_speed(pool: PlannedPool, step_time: StepTime, prompt: float, answer: float) -> float:
    """Tokens of load a second of one engine of a pool: as stated, else of requests of these mean lengths."""
    if pool.spec.speed is not None:
        return pool.spec.speed
    config, role = pool.scheduler.config, pool.spec.role
    seconds = 0.0
    if role != "decode":
        tokens = max(min(round(prompt), config.max_num_batched_tokens), 1)
        chunk = Chunk(ANY_SEQUENCE, tokens, max(round((prompt - tokens) / 2), 0), True)
        seconds += prompt / tokens * _seconds(pool, step_time, MixedBatch([chunk]))
    if role != "prefill":
        context = prompt + answer / 2
        blocks = config.num_gpu_blocks * config.block_size
        decodes = max(min(config.max_num_seqs, int(blocks / max(context, 1.0))), 1)
        stages = pool.scheduler.stages
        if stages is not None:  # each of the batches in flight has its part of them
            decodes = max(decodes // len(stages.layers), 1)
        batch = DecodeBatch((), [ANY_SEQUENCE] * decodes, round(decodes * context), round(context))
        seconds += max(answer - 1.0, 0.0) / decodes * _seconds(pool, step_time, batch)
    return pool.spec.engine.data_parallel_size * (prompt + answer) / seconds if seconds else 1.0


def _seconds(pool: PlannedPool, step_time: StepTime, batch: Batch) -> float:
    """Seconds from one such batch to the next: those of the slowest stage, if there are stages."""
    stages = pool.scheduler.stages
    return step_time.seconds(batch) if stages is None else max(step_time.stage_seconds(batch, stages.shares))


def colocated(parts: Parts) -> System:
    """A system whose engines compute each request from its prompt to its last token."""
    parts.make_engines()
    pools = parts.make_pools(parts.plan.prefill_engines)
    return System(parts.env, pools, {}, {}, **parts.plan.scenario.system.frontend.model_dump())


def disaggregated(parts: Parts) -> System:
    """A system of prefill engines that send KV caches to decode engines, over a link of each or one for all.

    Both kinds may serve one model, some, or all (SUN 3.2.3).
    """
    spec = parts.plan.scenario.system.kv_link
    assert spec is not None, "a system of prefill and decode pools has a link"
    parts.make_engines()
    prefill = parts.make_pools(parts.plan.prefill_engines)
    decode = parts.make_pools(parts.plan.decode_engines)
    speed = LinkSpeed(spec.bandwidth, spec.latency, spec.bytes_per_token)
    shared = Link(parts.env, speed)
    names = dict.fromkeys(name for engines in parts.plan.prefill_engines.values() for name in engines)
    links = {name: shared if spec.shared else Link(parts.env, speed) for name in names}
    frontend = parts.plan.scenario.system.frontend.model_dump()
    return System(parts.env, prefill, decode, links, **frontend, with_chunks=spec.transfer == "with_chunks")


TOPOLOGIES: Registry[Callable[[Parts], System]] = Registry(colocated=colocated, disaggregated=disaggregated)
