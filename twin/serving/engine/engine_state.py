"""The state of a simulated engine: what routers, autoscalers and reports see of it, and what is to come to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from schedulers.admission_control import RequestShed
from schedulers.batches import Batch
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import Core
from schedulers.router_views import CacheView, LoadTree
from schedulers.sequence import SubmitOptions
from twin.environment import Environment
from twin.serving.engine.fast_forward import RunningStep, StepRecords, Window, cores_of
from twin.serving.engine.links import CacheTraffic, TierLinks
from twin.serving.engine.speculation import SimulatedSpeculation
from twin.serving.records.engine_log import Counters, EngineLog
from twin.serving.records.requests import RequestRecord
from workloads.errors import BadInput
from workloads.request import Request

Watch = Callable[[Any, Batch, float, float], None]
"""Called with an `Engine`, a step that it has just begun, and the step's start and end, seconds. It must not change
them."""

TimeAfter = Callable[[int], float]

RequestsElsewhere = Callable[[int, int], int]
"""See `schedulers.routing.ForeseesChoices.requests_elsewhere`."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one simulated engine.

    Attributes:
        name, index: for logs, and for the order of step ends at the same instant.
        depth: steps that may run or be queued at a time; 2 with async scheduling.
        fast_forward: whether to pass over steps that change nothing.
        detail: whether the log keeps more than the summary needs.
        watch: called for each step that begins.
        speculation: which draft tokens are right; None for a scheduler that does not speculate.
        view: what routers know of its prefix cache; None: the cache itself.
        tier_links: to the tiers below its device, if its scheduler has some.
        deliver: seconds from the end of a step until clients have its tokens.
    """

    name: str
    index: int
    depth: int = 1
    fast_forward: bool = True
    detail: bool = True
    watch: Watch | None = None
    speculation: SimulatedSpeculation | None = None
    view: CacheView | None = None
    tier_links: TierLinks | None = None
    deliver: float = 0.0


Foresight = Callable[[], float]
"""Gives a time, in seconds, before which no request comes to an engine, if none of its own finishes."""


def foresight_of(time_after: TimeAfter, requests_elsewhere: RequestsElsewhere, position: int, size: int) -> Foresight:
    """The foresight of the engine at `position` in a pool of `size`, whose router has the method `requests_elsewhere`.

    `time_after`: gives a time before which at most so many requests arrive; infinity after the last.
    """
    return lambda: time_after(requests_elsewhere(position, size))


Answer = Callable[[bool], None]
"""Called with whether blocks have been reserved."""

Shed = Callable[[RequestRecord, RequestShed], None]


class EngineState:
    """The state of one engine, as of the last step begun. `Engine` changes it.

    Attributes:
        core: its scheduler. log: its steps. step_records: what they leave in the log and in records of requests.
        backlog: requests that wait for their first step.
        failed: whether it is down. in_service: whether routers may choose it while it has not failed.
        blocks, max_num_seqs: KV blocks of all ranks, and sequences that they can run at a time.
        find_speed: finds its `speed` when that is first asked for.
        on_shed: called with the record of each request that its scheduler sheds, and why.
        stage_busy: seconds that each stage of a pipeline has computed; empty without one.
    """

    def __init__(self, env: Environment, make_core: Callable[[], Core], options: EngineOptions) -> None:
        self.name = options.name
        self.index = options.index
        self.speculation = options.speculation
        self.tier_links = options.tier_links
        self.on_shed: Shed = lambda record, shed: None
        self._env = env
        self._make_core = make_core
        self.core = self._new_core()
        self.blocks = sum(core.kv_cache.num_blocks for core in self.cores)
        self.max_num_seqs = sum(core.config.max_num_seqs for core in self.cores)
        self.log = EngineLog(options.name, detail=options.detail)
        self.step_records = StepRecords(self.log, options.deliver, expects_ends=options.speculation is None)
        self.backlog = self.step_records.backlog
        self.failed = False
        self.in_service = True
        self.stage_busy: list[float] = []
        self.find_speed: Callable[[], float] = lambda: 1.0  # engines are alike
        self._speed = 0.0
        self._requests: list[tuple[RequestRecord, Request, SubmitOptions]] = []  # which the scheduler gets next
        self._reservations: list[tuple[RequestRecord, Answer]] = []
        self._coming_load = 0  # tokens that both add to the engine's load
        self._running: deque[RunningStep] = deque()
        self._window: Window | None = None
        self._cache_traffic: CacheTraffic | None = None
        self._lost_counters = Counters()  # of the schedulers that were lost in failures
        self._load_trees: list[tuple[LoadTree, int]] = []

    def _accept(self, now: float) -> None:
        """Pass all that has come to the scheduler, reservations first; BadInput for what the KV memory cannot hold."""
        core = self.core
        reservations = self._reservations
        self._reservations = []
        for record, answer in reservations:
            request = record.request
            self._coming_load -= request.prompt_tokens + request.max_tokens
            sequence = None if request.id in core.sequences else core.reserve(request, now)
            if sequence is not None:
                sequence.payload = record
            answer(sequence is not None)
        for record, request, options in self._requests:
            try:
                sequence = core.submit(request, now, options)
            except RequestShed as shed:
                self.backlog.withdraw(now)
                self.on_shed(record, shed)
                continue
            except ValueError as error:
                field = "max_num_batched_tokens" if "max_num_batched_tokens" in str(error) else "num_gpu_blocks"
                raise BadInput(str(error), field=f"engine.{field}") from None
            sequence.payload = record
            if record.queued < 0:
                record.queued = now
        self._requests.clear()
        self._coming_load = 0

    @property
    def load(self) -> int:
        return self.core.outstanding_tokens + self._coming_load

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
    def counters(self) -> Counters:
        """Counters of its schedulers over all ranks since the start of the run. Outages do not reset them."""
        return self._lost_counters.plus(self.cores)

    @property
    def free_blocks(self) -> int:
        """Free KV blocks of all ranks, as of the last step begun."""
        self._allocate_begun_steps()
        return sum(core.kv_cache.num_free_blocks for core in self.cores)

    def cached_prefix_tokens(self, request: Request) -> int:
        """See `schedulers.routing.EngineState`; with a view, as of the events that have come."""
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
        return not (self.core.sequences or self._requests or self._reservations or waits)

    @property
    def records(self) -> list[RequestRecord]:
        records: list[RequestRecord] = [sequence.payload for sequence in self.core.sequences.values()]  # type: ignore[misc]
        return records + [record for record, _, _ in self._requests]

    @property
    def num_running(self) -> int:
        return self.core.num_running

    @property
    def num_waiting(self) -> int:
        return self.core.num_waiting + len(self._requests)

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

    def check_is_empty(self) -> None:
        """Check that an engine whose requests are all answered has leaked nothing; AssertionError if it has."""
        self.core.check_integrity()
        assert self.free_blocks == self.blocks, f"{self.name}: {self.free_blocks} of {self.blocks} blocks are free"

    def _note_load(self) -> None:
        for loads, position in self._load_trees:
            loads.set(position, self.load)

    def _new_core(self) -> Core:
        """A scheduler without requests, as the engine has at the start and after each failure."""
        core = self._make_core()
        if self.speculation is not None:
            self.speculation.attach(core)
        return core
