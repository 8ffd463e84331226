"""Links that carry KV caches, between engines and to the tiers below a device, and an engine's traffic over them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass

import simpy
from simpy.events import Event

from schedulers.engine_core import EngineCore
from schedulers.kv_cache import CacheObserver
from schedulers.kv_tiers import Load
from schedulers.parallel_cores import Core
from schedulers.router_views import CacheView
from twin.environment import Alarm, Environment, Priority
from twin.serving.engine.fast_forward import Window, cores_of


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Attributes: `bandwidth` bytes/s, `latency` seconds, `bytes_per_token` of KV cache."""

    bandwidth: float
    latency: float
    bytes_per_token: float


class Link:
    """Sends one cache after the other, first come, first served. Contention is waiting for the link.

    Attributes:
        busy: time in which bytes were sent, seconds. moved: bytes sent, including those of interrupted transfers.
        sent: caches that were sent whole. waited: the sum of their waiting times, seconds.
    """

    def __init__(self, env: Environment, speed: LinkSpeed) -> None:
        self.busy = self.moved = self.waited = 0.0
        self.sent = 0
        self._env = env
        self._speed = speed
        self._wire = simpy.Resource(env)

    def send(self, tokens: int) -> Generator[Event, object, None]:
        """Wait for the link, then send the cache of `tokens` tokens until its last byte has left.

        Runs as part of a process. If that process is interrupted, it stops sending and the next cache goes.
        """
        env, size = self._env, tokens * self._speed.bytes_per_token
        requested = env.now
        with self._wire.request() as turn:
            yield turn
            start = env.now
            end = start + size / self._speed.bandwidth
            try:
                yield env.at(end)
            except simpy.Interrupt:
                if env.now > start:
                    self._count((env.now - start) / (end - start) * size)
                raise
        self._count(size)
        self.sent += 1
        self.waited += start - requested

    @property
    def latency(self) -> float:
        """Seconds from the last byte's departure to its arrival."""
        return self._speed.latency

    def arrival(self) -> Event:
        """When a cache arrives whose last byte leaves now."""
        return self._env.at(self._env.now + self._speed.latency, Priority.LATE)

    def _count(self, size: float) -> None:
        self.busy += size / self._speed.bandwidth
        self.moved += size


class CopyLink:
    """One direction of a link, which carries one copy after the other in the order of their requests.

    `busy`: seconds in which bytes were moved. `moved`: bytes. `waited`: the sum of waiting times, seconds.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.busy = self.moved = self.waited = 0.0
        self.copies = 0
        self._bandwidth = bandwidth
        self._latency = latency
        self._free_at = 0.0

    def copy(self, now: float, size: float) -> float:
        """Request a copy of `size` bytes `now`; returns when it is complete, seconds."""
        start = max(now, self._free_at)
        seconds = size / self._bandwidth
        self._free_at = start + seconds
        self.busy += seconds
        self.moved += size
        self.waited += start - now
        self.copies += 1
        return self._free_at + self._latency


@dataclass
class TierLinks:
    """The links of one engine, a pair for each tier.

    Attributes:
        names: of the tiers. capacities: prefix ids that each tier holds. node_tokens, node_bytes: of one prefix id.
        loads: to load from each tier; engines of one host share them. stores: to store into each, of this engine alone.
        loaded_nodes, stored_nodes: prefix ids that were loaded from each tier and stored in it, by its number.
        load_seconds: how long each load took, from the begin of its step to its last byte.
    """

    names: list[str]
    loads: list[CopyLink]
    stores: list[CopyLink]
    capacities: list[int]
    node_tokens: int
    node_bytes: float

    def __post_init__(self) -> None:
        self.loaded_nodes = [0] * len(self.names)
        self.stored_nodes = [0] * len(self.names)
        self.load_seconds = array("d")

    def load(self, now: float, nodes_by_tier: list[int]) -> float:
        """Load this many blocks from each tier; returns when all have come, seconds. Tiers load at the same time."""
        end = now
        for tier, nodes in enumerate(nodes_by_tier):
            if nodes:
                end = max(end, self.loads[tier].copy(now, nodes * self.node_bytes))
                self.loaded_nodes[tier] += nodes
        self.load_seconds.append(end - now)
        return end

    def store(self, tier: int, now: float) -> float:
        """Store a block into a tier; returns when it can be read, seconds."""
        self.stored_nodes[tier] += 1
        return self.stores[tier].copy(now, self.node_bytes)


class CacheTraffic:
    """The traffic of one engine that has tiers (`links`) or a view, which is what routers know of the cache.

    `on_load`: called when a prefix has come from tiers, which `finish_loads` passes to the scheduler.
    """

    def __init__(
        self, env: Environment, view: CacheView | None, links: TierLinks | None, on_load: Callable[[], None]
    ) -> None:
        self.view = view
        self.links = links
        self._env = env
        self._on_load = on_load
        self._cores: list[EngineCore] = []
        self._observers: list[CacheObserver] = []
        self._loaded: list[tuple[EngineCore, Load]] = []

    def follow(self, core: Core) -> None:
        """Follow the cache of a scheduler that is new and empty."""
        view = self.view
        self._cores = cores_of(core)
        self._observers = [] if view is None else [view]
        if view is not None:
            view.clear()
        for rank in self._cores:
            if rank.kv_tiers is not None:
                self._observers.append(rank.kv_tiers)
            if view is not None:
                rank.observe_cache(view)

    def lose_loads(self) -> None:
        """Forget what has been loaded: the engine has failed."""
        self._loaded.clear()

    def end_steps(self, core: Core, window: Window | None, now: float) -> None:
        """Tell the observers the time, after the evictions of a window that ends now."""
        if window is not None:
            self.allocate_begun(core, window, window.num_steps)
        for observer in self._observers:
            observer.now = now

    def allocate_begun(self, core: Core, window: Window, steps: int) -> None:
        """Allocate the blocks of a window's first steps as each begins, so that evictions are told with their times.

        What a step evicts may go to a tier, and what that tier then evicts to the next, if it is complete by then.
        """
        first = window.allocated
        if steps <= first:
            return
        window.allocated = steps
        new_blocks = core.num_new_blocks_by_step(steps)
        for step in range(first, steps):
            if new_blocks[step] or step == steps - 1:
                begin = window.ends[step - 1] if step else window.opened
                for observer in self._observers:
                    observer.now = begin
                core.allocate_ahead(step + 1)
                self.begin_copies(computed=False)

    def finish_loads(self) -> None:
        """Pass prefixes that have been loaded since the last step end to the scheduler."""
        for core, load in self._loaded:
            core.finish_load(load)
        self._loaded.clear()

    def begin_copies(self, *, computed: bool) -> None:
        """Begin the copies to and from tiers. `computed`: a step has ended."""
        links, now = self.links, self._env.now
        if links is None:
            return
        for core in self._cores:
            tiers = core.kv_tiers
            if tiers is None:
                continue
            for store in tiers.take_stores(computed):
                store.block.ready_at = links.store(store.tier, store.when)
            for load in tiers.take_loads():
                nodes = [0] * len(tiers.tiers)
                for tier, _ in load.sources:
                    nodes[tier] += 1
                self._load(core, load, links.load(now, nodes))

    def _load(self, core: EngineCore, load: Load, end: float) -> None:
        """Have a prefix that has come at `end` noticed at the next step end, or then if the engine is idle."""

        def loaded(now: float) -> None:
            if core in self._cores:  # it has not failed since
                self._loaded.append((core, load))
                self._on_load()

        self._env.set(Alarm(Priority.LATE, loaded), end)
