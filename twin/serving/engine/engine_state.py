"""The state of a simulated engine: what routers, autoscalers and reports see of it, and what is to come to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from schedulers.admission_control import RequestShed
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup
from schedulers.router_views import LoadTree
from twin.environment import Environment
from twin.serving.engine.fast_forward import RunningStep, StepRecords, Window, cores_of
from twin.serving.engine.links import CacheTraffic, TierLinks
from twin.serving.engine.speculation import SimulatedSpeculation
from twin.serving.records.engine_log import Counters, EngineLog
from twin.serving.records.overload import Backlog
from twin.serving.records.requests import RequestRecord
from workloads.errors import BadInput
from workloads.request import Request

TimeAfter = Callable[[int], float]

RequestsElsewhere = Callable[[int, int], int]
"""See `schedulers.routing.ForeseesChoices.requests_elsewhere`."""


class Foresight:
    """The knowledge that one engine of a pool has of the coming requests.

    Args:
        time_after: gives a time, in seconds, before which at most so many requests arrive; infinity after the last.
        requests_elsewhere: of the pool's router. position, size: of the engine in the pool, and of the pool.
    """

    def __init__(self, time_after: TimeAfter, requests_elsewhere: RequestsElsewhere, position: int, size: int) -> None:
        self._time_after = time_after
        self._requests_elsewhere = requests_elsewhere
        self._position = position
        self._size = size

    def no_request_before(self) -> float:
        """A time, in seconds, before which no request comes to the engine, if none of its own finishes."""
        # Python 3.11 is slow to call an instance's attribute.
        time_after, requests_elsewhere = self._time_after, self._requests_elsewhere
        return time_after(requests_elsewhere(self._position, self._size))


Answer = Callable[[bool], None]
"""Called with whether blocks have been reserved."""

Shed = Callable[[RequestRecord, RequestShed], None]

Submission = tuple[RequestRecord, Request, int | None, bool, bool]
"""A request for `EngineCore.submit`: its record, the request, and the options max_tokens, remote_prefill, hold_blocks.
"""


class Inbox:
    """Requests and reservations that an engine's scheduler gets at the next step end.

    Attributes:
        requests, reservations: in order. load: tokens that they add to the engine's load.
    """

    def __init__(self) -> None:
        self.requests: list[Submission] = []
        self.reservations: list[tuple[RequestRecord, Answer]] = []
        self.load = 0

    def add(self, submission: Submission, core: EngineCore | LockstepGroup) -> None:
        """Add a request. If blocks are reserved for it, the scheduler counts its load already."""
        _, request, max_tokens, remote_prefill, _ = submission
        self.requests.append(submission)
        if not (remote_prefill and request.id in core.reserved):
            self.load += request.prompt_tokens + (max_tokens or request.max_tokens)

    def reserve(self, record: RequestRecord, answer: Answer) -> None:
        """Add a prompt that a prefill engine computes."""
        self.reservations.append((record, answer))
        self.load += record.request.prompt_tokens + record.request.max_tokens

    def cancel(self, record: RequestRecord) -> None:
        """Take out the reservation for a request, if there is one."""
        self.reservations = [entry for entry in self.reservations if entry[0] is not record]

    def accept(self, core: EngineCore | LockstepGroup, now: float, backlog: Backlog, on_shed: Shed) -> None:
        """Pass everything to the scheduler, reservations first.

        Raises:
            BadInput: a request does not fit into the KV memory, even alone.
        """
        if self.reservations:
            self._decide_reservations(core, now)
        for record, request, max_tokens, remote_prefill, hold_blocks in self.requests:
            try:
                sequence = core.submit(
                    request, now, max_tokens=max_tokens, remote_prefill=remote_prefill, hold_blocks=hold_blocks,
                    never_shed=record.attempts > 0,
                )  # fmt: skip
            except RequestShed as shed:
                backlog.withdraw(now)
                on_shed(record, shed)
                continue
            except ValueError as error:
                field = "max_num_batched_tokens" if "max_num_batched_tokens" in str(error) else "num_gpu_blocks"
                raise BadInput(str(error), field=f"engine.{field}") from None
            sequence.payload = record
            if record.queued < 0:
                record.queued = now
        self.requests.clear()
        self.load = 0

    def _decide_reservations(self, core: EngineCore | LockstepGroup, now: float) -> None:
        """Answer whether blocks can be reserved, and reserve them."""
        reservations = self.reservations
        self.reservations = []
        for record, answer in reservations:
            request = record.request
            self.load -= request.prompt_tokens + request.max_tokens
            sequence = None if request.id in core.sequences else core.reserve(request, now)
            if sequence is not None:
                sequence.payload = record
            answer(sequence is not None)

    def clear(self) -> list[RequestRecord]:
        """Empty it; returns the records of its requests."""
        records = [record for record, *_ in self.requests]
        self.requests.clear()
        self.reservations.clear()
        self.load = 0
        return records


class EngineState:
    """The state of one engine, as of the last step begun. `Engine` has the arguments and changes it.

    Attributes:
        name, index: for logs, and for the order of step ends at the same instant.
        core: its scheduler. log: its steps. step_records: what they leave in the log and in records of requests.
        backlog: requests that wait for their first step.
        failed: whether it is down. in_service: whether routers may choose it while it has not failed.
        blocks, max_num_seqs: KV blocks of all ranks, and sequences that they can run at a time.
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
        self.blocks = sum(core.kv_cache.num_blocks for core in self.cores)
        self.max_num_seqs = sum(core.config.max_num_seqs for core in self.cores)
        self.log = EngineLog(name, detail=detail)
        self.step_records = StepRecords(self.log, deliver, expects_ends=speculation is None)
        self.backlog: Backlog = self.step_records.backlog
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
    def counters(self) -> Counters:
        """Counters of its schedulers over all ranks since the start of the run. Outages do not reset them."""
        return self._lost_counters.plus(self.cores)

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

    def check_is_empty(self) -> None:
        """Check that an engine whose requests are all answered has leaked nothing.

        Raises:
            AssertionError: it has, which is an error of the simulator.
        """
        self.core.check_integrity()
        if self.free_blocks != self.blocks:
            raise AssertionError(f"{self.name}: {self.free_blocks} of {self.blocks} blocks are free")

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
