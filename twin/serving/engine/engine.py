"""A simulated engine: the scheduler decides each step, a step-time model says how long it takes.

An engine sets its alarm from one step end to the next. There it ends the step that has run, passes new requests to the
scheduler, and begins the next step. With `depth` 2 it is one step ahead, as vLLM is with async
scheduling: at a step end the next step already runs, and the engine begins the one after it.

With `fast_forward` it passes over the ends of steps that change nothing (`twin.serving.engine.fast_forward`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from latency_models.step_time import StepTime
from schedulers.admission_control import RequestShed
from schedulers.batches import Batch, OneShotBatch
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import CacheObserver
from schedulers.kv_events import CacheView
from schedulers.kv_tiers import Load
from schedulers.load_tree import LoadTree
from schedulers.lockstep import GroupBatch, LockstepGroup
from schedulers.sequence import DECODING, Sequence
from twin.environment import Alarm, Environment, Priority
from twin.serving.engine.answer_ends import AnswerEnds
from twin.serving.engine.drafted_windows import DraftedWindows
from twin.serving.engine.fast_forward import FastForward, RunningStep, Window, cores_of
from twin.serving.engine.foresight import Foresight
from twin.serving.engine.speculation import SimulatedSpeculation
from twin.serving.engine.tier_links import TierLinks
from twin.serving.records.engine_log import DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP, Counters, EngineLog
from twin.serving.records.overload import Backlog
from twin.serving.records.requests import UNSET, RequestRecord
from workloads.errors import BadInput
from workloads.request import Request

Finished = Callable[[RequestRecord, Sequence], None]

OnChunk = Callable[[Sequence, int], None]

Shed = Callable[[RequestRecord, RequestShed], None]

Watch = Callable[["Engine", Batch, float, float], None]
"""Called with the engine, a step that it has just begun, and the step's start and end, seconds. It must not change
them."""


Answer = Callable[[bool], None]
"""Called with whether blocks have been reserved."""

Submission = tuple[RequestRecord, Request, int | None, bool, bool]
"""A request for `EngineCore.submit`: its record, the request, and the options max_tokens, remote_prefill, hold_blocks.
"""


class Engine:
    """One engine of the simulated system.

    Args:
        env: the simulation's environment.
        make_core: makes the engine's scheduler, at the start and after each failure.
        step_time: gives the durations of steps.
        depth: steps that may run or be queued at a time; 2 with async scheduling.
        fast_forward: whether to pass over steps that change nothing.
        detail: whether the log keeps more than the summary needs.
        watch: called for each step that begins.
        speculation: which draft tokens are right; None for a scheduler that does not speculate.
        view: what routers know of its prefix cache; None: the cache itself.
        tier_links: to the tiers below its device, if its scheduler has some.
        deliver: seconds from the end of a step until clients have its tokens.

    Attributes:
        name, index: for logs, and for the order of step ends at the same instant.
        core: its scheduler. log: its steps. backlog: requests that wait for their first step.
        failed: whether it is down. in_service: whether routers may choose it while it has not failed.
        foresight: until when no request comes to it; None if that is not known.
        speculation: see above.
        tier_links: as given.
        find_speed: finds its `speed` when that is first asked for.
        stage_busy: seconds that each stage of a pipeline has computed; empty without one.
        on_finish: called with the record and the sequence of each finished request, at its last step's end.
        on_chunk: called with the sequence of each chunk that is not its prompt's last, and the tokens computed with it:
            -1 when its step begins and the number when it ends; None for nothing.
        on_shed: called with the record of each request that its scheduler sheds, and why.
    """

    def __init__(
        self,
        env: Environment,
        make_core: Callable[[], EngineCore | LockstepGroup],
        step_time: StepTime,
        *,
        name: str,
        index: int,
        depth: int = 1,
        fast_forward: bool = True,
        detail: bool = True,
        watch: Watch | None = None,
        speculation: SimulatedSpeculation | None = None,
        view: CacheView | None = None,
        tier_links: TierLinks | None = None,
        deliver: float = 0.0,
    ) -> None:
        self.name, self.index = name, index
        self.speculation = speculation
        self._make_core = make_core
        self.core = self._new_core()
        self.log = EngineLog(name, detail=detail)
        self.on_finish: Finished = lambda record, sequence: None
        self.on_chunk: OnChunk | None = None
        self.on_shed: Shed = lambda record, shed: None
        self._sheds = any(core.admission_control is not None for core in self.cores)
        self.foresight: Foresight | None = None
        self.failed = False
        self.stage_busy: list[float] = []
        self.find_speed: Callable[[], float] = _unknown_speed
        self._speed = 0.0
        self.in_service = True
        self.backlog = Backlog()
        self._env, self._step_time = env, step_time
        self._depth, self._watch = depth, watch
        self._deliver = deliver
        self._free_at = 0.0
        self._alarm = Alarm(Priority.STEP_END + index, self._wake_up)
        self._seconds = self._group_seconds if isinstance(self.core, LockstepGroup) else step_time.seconds
        self._inbox: list[Submission] = []
        self._inbox_load = 0
        self._reservations: list[tuple[RequestRecord, Answer]] = []
        self._running: deque[RunningStep] = deque()
        self._answer_ends = AnswerEnds()
        # Of prompts that are computed again: the step of the token before. They may be preempted once more meanwhile.
        self._step_before: dict[Sequence, int] = {}
        self._window: Window | None = None
        self._fast_forward: FastForward | None = None
        if fast_forward:
            parts = self.log, self._running, self._answer_ends, step_time
            if speculation is not None and speculation.acceptance.measured is None:
                self._fast_forward = DraftedWindows(*parts, speculation)
            else:  # measured outcomes are looked up step by step
                self._fast_forward = FastForward(*parts)
        self._lost_steps = 0  # of the schedulers that were lost in failures
        self._lost_counters = Counters()  # of these schedulers
        self._failed_at = 0.0
        self._load_trees: list[tuple[LoadTree, int]] = []
        self.tier_links = tier_links
        self._loaded: list[tuple[EngineCore, Load]] = []
        self._view = view
        self._observers: list[CacheObserver] = []
        self._observe_cache()

    def _new_core(self) -> EngineCore | LockstepGroup:
        """A scheduler without requests, as the engine has at the start and after each failure."""
        core = self._make_core()
        if self.speculation is not None:
            self.speculation.attach(core)
        return core

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _wake_up(self, now: float) -> None:
        """Visit step ends for as long as nothing else happens before the next one; then sleep until that."""
        env, priority = self._env, self._alarm.priority
        step_end = self._visit_step_end(now)
        while step_end is not None and env.advance_to(step_end, priority):
            step_end = self._visit_step_end(step_end)
        if step_end is not None:
            self._sleep_until(step_end)

    def _sleep_until(self, step_end: float) -> None:
        """Set the alarm to the next step end to visit. Those that change nothing outside are visited before."""
        if self.foresight is not None and not self._next_visit_tells():
            no_request_before, next_end = self.foresight.no_request_before(), step_end
            while next_end < no_request_before and not self._next_visit_tells():
                visited = self._visit_step_end(next_end)
                if visited is None:
                    self._alarm.unset()
                    return
                next_end = visited
            step_end = next_end
        if not (self._alarm.is_set and self._alarm.when == step_end):
            self._env.set(self._alarm, step_end)

    def _next_visit_tells(self) -> bool:
        """Tell whether something outside may notice the next visit: a request finishes, or the load changes."""
        if self._reservations or (self._sheds and self._inbox):
            return True
        for _, request, max_tokens, _, _ in self._inbox:
            if not (max_tokens or request.max_tokens):  # it counts for a token more once the scheduler has it
                return True
        if self._window is not None:
            return self._window.finishes
        if self.speculation is not None:
            return True
        if self._running:
            batch = self._running[0][0]
            return bool(batch.finishing) or self._answer_ends.may_end(batch.step_index)
        return False

    def _visit_step_end(self, now: float) -> float | None:
        """End the step that has run, accept requests, and begin the next step. Returns the next step end to visit."""
        self.log.events += 1
        finished = self._end_steps(now)
        for sequence in finished:
            self._finish(sequence, now)
        if self.tier_links is not None:
            self._finish_loads()
            self._begin_copies(computed=True)
        if self._inbox or self._reservations:
            self._accept_requests(now)
            self._note_load()
        elif finished:
            self._note_load()
        if finished and now < self._free_at:
            return self._while_held(now)
        self._begin_steps(now)
        if self.tier_links is not None:
            self._begin_copies(computed=False)
        log, core, window = self.log, self.core, self._window
        if finished or window is None:
            log.running_seqs.set(now, core.num_running_seqs)
        if window is not None:  # its states are logged when it is closed
            return window.end
        if log.detail:
            log.state(now, core.num_running, core.num_waiting, self.free_blocks)
        return self._running[0][2] if self._running else None

    def _while_held(self, now: float) -> float:
        """Begin no step (see `hold`). Returns the next visit: the end of a step that runs, or of the hold."""
        log, core = self.log, self.core
        log.running_seqs.set(now, core.num_running_seqs)
        if log.detail:
            log.state(now, core.num_running, core.num_waiting, self.free_blocks)
        return self._running[0][2] if self._running else self._free_at

    def _notice(self, now: float, late: bool) -> None:
        """Have the engine notice new work at the next step end, or now if it is idle."""
        if not self._alarm.is_set:
            self._sleep_until(now)
        elif self._window is not None and self._window.cut(now, late):
            self._sleep_until(self._window.end)
        elif self.foresight is not None:
            self._sleep_until(self._alarm.when)

    def _note_load(self) -> None:
        """Note the load wherever it is followed."""
        for loads, position in self._load_trees:
            loads.set(position, self.load)

    # -- for the system around it ------------------------------------------------------------------------------------

    def submit(
        self,
        record: RequestRecord,
        request: Request | None = None,
        *,
        max_tokens: int | None = None,
        remote_prefill: bool = False,
        hold_blocks: bool = False,
        late: bool = False,
    ) -> None:
        """Hand in a request. Its scheduler gets it at the next step end, or now if the engine is idle.

        Args:
            record: where its times are kept. request: in place of the record's own.
            max_tokens, remote_prefill, hold_blocks: see `EngineCore.submit`.
            late: the step ends of this instant are over (see `Priority.LATE`).
        """
        request = request or record.request
        now = self._env.now
        self.backlog.arrive(now)
        self._inbox.append((record, request, max_tokens, remote_prefill, hold_blocks))
        if not (remote_prefill and request.id in self.core.reserved):  # the scheduler counts it already
            self._inbox_load += request.prompt_tokens + (max_tokens or request.max_tokens)
        self._note_load()
        self._notice(now, late)

    def reserve(self, record: RequestRecord, answer: Answer) -> None:
        """Reserve blocks for a prompt that a prefill engine computes (`EngineCore.reserve`).

        It is decided at the next step end, or now if the engine is idle. A request that is in the scheduler by then
        needs nothing reserved.
        """
        self._reservations.append((record, answer))
        self._inbox_load += record.request.prompt_tokens + record.request.max_tokens
        self._note_load()
        self._notice(self._env.now, late=True)

    def cancel(self, record: RequestRecord) -> None:
        """Give up what is or is to be reserved for a request."""
        self._reservations = [entry for entry in self._reservations if entry[0] is not record]
        if record.request.id in self.core.reserved:
            self._allocate_begun_steps()
            if self._window is not None and self._fast_forward is not None:
                self._fast_forward.log_begun_steps(self.core, self._window, self._env.now)
            self.core.abort(record.request.id, self._env.now)
            self._note_load()
            if self.core.num_waiting:
                self._notice(self._env.now, late=True)

    def hold(self, seconds: float) -> float:
        """Begin no step for some time; for `on_finish`. Returns the end of this time; calls add up."""
        self._free_at = max(self._free_at, self._env.now) + seconds
        return self._free_at

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence submitted with `hold_blocks`; noticed at the next step end, or now if idle."""
        self.core.release(sequence)
        if self._window is None:
            self.log.state(self._env.now, self.core.num_running, self.core.num_waiting, self.free_blocks)
        if self.core.num_waiting:
            self._notice(self._env.now, late=True)

    @property
    def load(self) -> int:
        """Prompt tokens plus `max_tokens` of its unfinished requests (`EngineCore.outstanding_tokens`)."""
        return self.core.outstanding_tokens + self._inbox_load

    @property
    def speed(self) -> float:
        """Tokens of load that it works off a second when it is full (`twin.serving.system.parts`)."""
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
        if self._view is not None:
            return self._view.cached_prefix_tokens(request, self._env.now)
        return self.core.cached_prefix_tokens(request)

    def _allocate_begun_steps(self) -> None:
        """Bring the KV cache up to the steps of an open window that have begun."""
        window = self._window
        if window is not None:
            begun = window.num_begun(self._env.now)
            if self._observers:
                self._allocate_one_by_one(window, begun)
                if self.tier_links is not None:  # what these steps have evicted may be on its way to a tier
                    self._begin_copies(computed=False)
            self.core.allocate_ahead(begun)

    def _allocate_one_by_one(self, window: Window, steps: int) -> None:
        """Allocate the blocks of a window's first steps as each begins, so that evictions are told with their times."""
        first = window.allocated
        if steps <= first:
            return
        window.allocated = steps
        new_blocks = self.core.num_new_blocks_by_step(steps)
        for step in range(first, steps):
            if new_blocks[step] or step == steps - 1:
                begin = window.ends[step - 1] if step else window.opened
                for observer in self._observers:
                    observer.now = begin
                self.core.allocate_ahead(step + 1)

    def _observe_cache(self) -> None:
        """Let the view see the cache of the scheduler, which is new and empty."""
        view = self._view
        self._observers = [] if view is None else [view]
        if view is not None:
            view.clear()
        for core in self.cores:
            if core.kv_tiers is not None:
                self._observers.append(core.kv_tiers)
            if view is not None:
                core.observe_cache(view)

    def fail(self) -> list[RequestRecord]:
        """Stop at once and return the records of all unfinished requests, oldest first. Unfinished steps are lost."""
        now = self._env.now
        if self._window is not None and self._fast_forward is not None:
            self._allocate_begun_steps()
            self._fast_forward.close_early(self.core, self._window, now)
        self._window = None
        self._reservations.clear()
        for number in list(self.core.reserved):  # their prompts are still being computed
            self.core.abort(number, now)
        lost = [self._abort(sequence, now) for sequence in list(self.core.sequences.values())]
        lost.extend(record for record, *_ in self._inbox)
        self._inbox.clear()
        self._inbox_load = 0
        self._loaded.clear()
        self._running.clear()
        self._answer_ends.clear()
        self._step_before.clear()
        self.backlog.lose_all(now)
        if not self.failed:
            self._failed_at = now
        self.failed = True
        self.log.running_seqs.set(now, 0)
        self.log.state(now, 0, 0, self.blocks)
        self._alarm.unset()
        return lost

    def recover(self) -> None:
        """Work again, with an empty cache."""
        self.restart()
        self.log.outages.append((self._failed_at, self._env.now))
        self.failed = False

    def restart(self) -> None:
        """Have a new scheduler, with an empty cache. The engine has no requests."""
        self._running.clear()  # with async scheduling, a step may have begun before the last answer ended
        self._answer_ends.clear()
        self._alarm.unset()
        self._lost_counters = self.counters
        self.core = self._new_core()
        self._lost_steps = self.log.num_steps
        self._observe_cache()

    @property
    def is_idle(self) -> bool:
        """True if it has no requests, and no cache that is still to be sent."""
        waits = any(core.awaiting_transfer for core in self.cores)
        return not (self.core.sequences or self._inbox or self._reservations or waits)

    @property
    def records(self) -> list[RequestRecord]:
        """Its unfinished requests."""
        found: list[RequestRecord] = [each.payload for each in self.core.sequences.values()]  # type: ignore[misc]
        return found + [record for record, *_ in self._inbox]

    @property
    def num_running(self) -> int:
        """Requests that are admitted and unfinished, as of the last step begun."""
        return self.core.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return self.core.num_waiting + len(self._inbox)

    def busy_until(self, now: float) -> float:
        """The time in which steps have run, up to now and with the step that runs; seconds."""
        if self._running:
            return self.log.busy_until(self._running[0][1], now)
        if self._window is not None:
            return self.log.busy_until(self._window.opened, now)
        return self.log.busy

    def _abort(self, sequence: Sequence, now: float) -> RequestRecord:
        """Take a sequence out of the scheduler, with the tokens of the steps that have ended."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        steps_ended = self.core.step_index - len(self._running)
        self.core.abort(sequence.request.id, now)
        if sequence.left_step > steps_ended:
            sequence.num_output_tokens -= sequence.left_step - steps_ended
        record.delivered += max(sequence.num_output_tokens, 0)
        record.preemptions += sequence.preemptions
        return record

    # -- at a step end -----------------------------------------------------------------------------------------------

    def _finish_loads(self) -> None:
        """Pass prefixes that have been loaded since the last step end to the scheduler."""
        for core, load in self._loaded:
            core.finish_load(load)
        self._loaded.clear()

    def _begin_copies(self, *, computed: bool) -> None:
        """Begin the copies to and from tiers. `computed`: a step has ended."""
        links, now = self.tier_links, self._env.now
        assert links is not None
        for core in self.cores:
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
            if core in self.cores:  # it has not failed since
                self._loaded.append((core, load))
                self._notice(self._env.now, late=True)

        self._env.set(Alarm(Priority.LATE, loaded), end)

    def _observe_step_end(self, now: float) -> None:
        """Tell the observers the time, after the evictions of a window that ends now."""
        if self._window is not None:
            self._allocate_one_by_one(self._window, self._window.num_steps)
        for observer in self._observers:
            observer.now = now

    def _end_steps(self, now: float) -> list[Sequence]:
        """End the window or the step that has run; returns the sequences that finish with it."""
        if self._observers:
            self._observe_step_end(now)
        if self._window is not None:
            return self._close_window(self._window)
        if not self._running:
            return []
        batch, start, end = self._running.popleft()
        return self._end_step(batch, start, end)

    def _close_window(self, window: Window) -> list[Sequence]:
        """End all steps of the window; returns the sequences that finish with it."""
        assert self._fast_forward is not None
        self._window = None
        return self._fast_forward.close(self.core, window)

    def _end_step(self, batch: Batch, start: float, end: float) -> list[Sequence]:
        """End a step that has run; returns the sequences that finish with it."""
        log, speculation = self.log, self.speculation
        if speculation is None:
            stopped = self._answer_ends.pop(batch.step_index)
        else:
            stopped = speculation.stopped(self.core, batch)
        finished = self.core.end_step(batch, stopped, end)
        log.ran(start, end)
        log.step(end, batch.n_decodes - len(batch.transferred))
        if log.detail:
            kind = DECODE_STEP if not batch.chunks else ONE_SHOT_STEP if isinstance(batch, OneShotBatch) else MIXED_STEP
            log.step_details(kind, batch.prefill_tokens, start)
        for chunk in batch.chunks:
            if chunk.last:
                self._first_token(chunk.sequence, end)
            elif self.on_chunk is not None:
                self.on_chunk(chunk.sequence, chunk.context + chunk.tokens)
        for sequence in batch.transferred:
            record: RequestRecord = sequence.payload  # type: ignore[assignment]
            log.odd_gaps.append(end + self._deliver - record.first_token)
        return finished

    def _first_token(self, sequence: Sequence, end: float) -> None:
        """Note the first token after a prompt was computed, for the first time or again after a preemption."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        before = self._step_before.pop(sequence, 0) if self._step_before else 0
        if record.first_token == UNSET:
            record.first_token = end + self._deliver
        elif before:
            self.log.odd_gaps.append(end - self._end_of_step(before))

    def _end_of_step(self, step: int) -> float:
        """When a step of the present scheduler ended, seconds. `step`: its `Batch.step_index`."""
        return self.log.end_of(self._lost_steps + step - 1)

    def _finish(self, sequence: Sequence, end: float) -> None:
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        record.last_token = end + self._deliver
        record.output_tokens = min(record.delivered + sequence.num_output_tokens, record.answer_tokens)
        record.preemptions += sequence.preemptions
        record.replica = self.name
        self.on_finish(record, sequence)

    def _accept_requests(self, now: float) -> None:
        """Pass the requests handed in since the last step end to the scheduler, after reservations."""
        if self._reservations:
            self._decide_reservations(now)
        for record, request, max_tokens, remote_prefill, hold_blocks in self._inbox:
            try:
                sequence = self.core.submit(
                    request, now, max_tokens=max_tokens, remote_prefill=remote_prefill, hold_blocks=hold_blocks,
                    never_shed=record.attempts > 0,
                )  # fmt: skip
            except RequestShed as shed:
                self.backlog.withdraw(now)
                self.on_shed(record, shed)
                continue
            except ValueError as error:
                raise BadInput(str(error), field="engine.num_gpu_blocks") from None
            sequence.payload = record
            if record.queued < 0:
                record.queued = now
        self._inbox.clear()
        self._inbox_load = 0

    def _decide_reservations(self, now: float) -> None:
        """Answer whether blocks can be reserved, and reserve them."""
        reservations, self._reservations = self._reservations, []
        for record, answer in reservations:
            request = record.request
            self._inbox_load -= request.prompt_tokens + request.max_tokens
            sequence = None if request.id in self.core.sequences else self.core.reserve(request, now)
            if sequence is not None:
                sequence.payload = record
            answer(sequence is not None)

    def _begin_steps(self, now: float) -> None:
        """Begin steps until `depth` of them run, or open a window."""
        running, free_places = self._running, self._depth - len(self._running)
        seconds = self._seconds  # Python 3.11 is slow to call an instance's attribute
        while free_places:
            if free_places == 1 and self._fast_forward is not None:
                self._window = self._fast_forward.open(self.core, now)
                if self._window is not None:
                    return
            batch = self.core.begin_step(now)
            if batch is None:
                return
            start = running[-1][2] if running else now
            end = start + seconds(batch)
            running.append((batch, start, end))
            if self._watch is not None:
                self._watch(self, batch, start, end)
            if batch.chunks or batch.transferred:
                self._note_starts(batch, now)
            free_places -= 1

    def _note_starts(self, batch: Batch, now: float) -> None:
        """Note the sequences whose first step or first decode begins."""
        for chunk in batch.chunks:
            sequence = chunk.sequence
            record: RequestRecord = sequence.payload  # type: ignore[assignment]
            if chunk.context == sequence.num_cached_tokens and not sequence.preemptions:
                self.backlog.start(now)
            if record.scheduled < 0:
                record.scheduled = now
                record.cached_tokens = sequence.num_cached_tokens
            if chunk.last and sequence.preempted_step:
                self._step_before[sequence] = sequence.preempted_step
            if chunk.last and sequence.state == DECODING and self.speculation is None:
                self._answer_ends.expect(sequence, batch.step_index)
            if self.on_chunk is not None and not chunk.last:
                self.on_chunk(sequence, -1)
        for sequence in batch.transferred:
            self.backlog.start(now)
            if self.speculation is None:
                self._answer_ends.expect(sequence, batch.step_index - 1)

    def _group_seconds(self, batch: Batch) -> float:
        assert isinstance(batch, GroupBatch)
        return self._step_time.group_seconds(batch)


def _unknown_speed() -> float:
    """1: engines are alike."""
    return 1.0
