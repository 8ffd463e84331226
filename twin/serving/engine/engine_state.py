"""The state of a simulated engine: what routers, autoscalers and reports see of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup
from schedulers.router_views import LoadTree
from twin.environment import Environment
from twin.serving.engine.cache_traffic import CacheTraffic, TierLinks
from twin.serving.engine.fast_forward import RunningStep, Window, cores_of
from twin.serving.engine.inbox import Inbox
from twin.serving.engine.speculation import SimulatedSpeculation
from twin.serving.engine.step_records import StepRecords
from twin.serving.records.engine_log import Counters, EngineLog
from twin.serving.records.overload import Backlog
from twin.serving.records.requests import RequestRecord
from workloads.request import Request


class EngineState:
    """The state of one engine, as of the last step begun. `Engine` has the arguments and changes it.

    Attributes:
        name, index: for logs, and for the order of step ends at the same instant.
        core: its scheduler. log: its steps. step_records: what they leave in the log and in records of requests.
        failed: whether it is down. in_service: whether routers may choose it while it has not failed.
        speculation, tier_links: as given.
        find_speed: finds its `speed` when that is first asked for.
        stage_busy: seconds that each stage of a pipeline has computed; empty without one.
    """

    def __init__(
        self,
        env: Environment,
        make_core: Callable[[], EngineCore | LockstepGroup],
        name: str,
        index: int,
        detail: bool,
        speculation: SimulatedSpeculation | None,
        tier_links: TierLinks | None,
        deliver: float,
    ) -> None:
        self.name = name
        self.index = index
        self.speculation = speculation
        self.tier_links = tier_links
        self._env = env
        self._make_core = make_core
        self.core = self._new_core()
        self.log = EngineLog(name, detail=detail)
        self.step_records = StepRecords(self.log, deliver, expects_ends=speculation is None)
        self.failed = False
        self.in_service = True
        self.stage_busy: list[float] = []
        self.find_speed: Callable[[], float] = lambda: 1.0  # engines are alike
        self._speed = 0.0
        self._inbox = Inbox()
        self._running: deque[RunningStep] = deque()
        self._window: Window | None = None
        self._cache_traffic: CacheTraffic | None = None
        self._lost_counters = Counters()  # of the schedulers that were lost in failures
        self._load_trees: list[tuple[LoadTree, int]] = []

    @property
    def load(self) -> int:
        """Prompt tokens plus `max_tokens` of its unfinished requests (`EngineCore.outstanding_tokens`)."""
        return self.core.outstanding_tokens + self._inbox.load

    @property
    def speed(self) -> float:
        """Tokens of load that it works off a second when it is full (`twin.serving.system.topologies`)."""
        if not self._speed:
            self._speed = self.find_speed()
        return self._speed

    def follow_load(self, loads: LoadTree, position: int) -> None:
        """Note the load at `position` of `loads` whenever it changes, until `unfollow_load`."""
        self._load_trees.append((loads, position))

    def unfollow_load(self, loads: LoadTree) -> None:
        """Note the load in `loads` no more."""
        self._load_trees = [entry for entry in self._load_trees if entry[0] is not loads]

    @property
    def cores(self) -> list[EngineCore]:
        """Its scheduler, or those of its data-parallel ranks."""
        return cores_of(self.core)

    @property
    def backlog(self) -> Backlog:
        """Requests that wait for their first step."""
        return self.step_records.backlog

    @property
    def counters(self) -> Counters:
        """Counters of its schedulers over all ranks since the start of the run. Outages do not reset them."""
        return self._lost_counters.plus(self.cores)

    @property
    def blocks(self) -> int:
        """KV blocks of all ranks."""
        return sum(core.kv_cache.num_blocks for core in self.cores)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that all ranks together can run at a time."""
        return sum(core.config.max_num_seqs for core in self.cores)

    @property
    def free_blocks(self) -> int:
        """Free KV blocks of all ranks, as of the last step begun."""
        self._allocate_begun_steps()
        return sum(core.kv_cache.num_free_blocks for core in self.cores)

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in the prefix cache, as of the last step begun.

        With a view, as of the events that have come.
        """
        self._allocate_begun_steps()
        traffic = self._cache_traffic
        if traffic is not None and traffic.view is not None:
            return traffic.view.cached_prefix_tokens(request, self._env.now)
        return self.core.cached_prefix_tokens(request)

    def _allocate_begun_steps(self) -> None:
        """Bring the KV cache up to the steps of an open window that have begun."""
        window = self._window
        if window is not None:
            num_steps = window.num_begun(self._env.now)
            if self._cache_traffic is not None:
                self._cache_traffic.allocate_begun(self.core, window, num_steps)
            self.core.allocate_ahead(num_steps)

    @property
    def is_idle(self) -> bool:
        """True if it has no requests, and no cache that is still to be sent."""
        waits = any(core.awaiting_transfer for core in self.cores)
        return not (self.core.sequences or self._inbox.requests or self._inbox.reservations or waits)

    @property
    def records(self) -> list[RequestRecord]:
        records: list[RequestRecord] = [sequence.payload for sequence in self.core.sequences.values()]  # type: ignore[misc]
        return records + [record for record, *_ in self._inbox.requests]

    @property
    def num_running(self) -> int:
        """Requests that are admitted and unfinished, as of the last step begun."""
        return self.core.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return self.core.num_waiting + len(self._inbox.requests)

    def busy_until(self, now: float) -> float:
        """The time in which steps have run, up to now and with the step that runs; seconds."""
        if self._running:
            return self.log.busy_until(self._running[0][1], now)
        if self._window is not None:
            return self.log.busy_until(self._window.opened, now)
        return self.log.busy

    def running_until(self, now: float) -> float:
        """The integral of running sequences that count towards `max_num_seqs` up to now, in sequences times seconds."""
        return self.log.running_seqs.until(now)

    def _note_load(self) -> None:
        """Note the load wherever it is followed."""
        for loads, position in self._load_trees:
            loads.set(position, self.load)

    def _new_core(self) -> EngineCore | LockstepGroup:
        """A scheduler without requests, as the engine has at the start and after each failure."""
        core = self._make_core()
        if self.speculation is not None:
            self.speculation.attach(core)
        return core
