"""A simulated engine: the scheduler decides each step, a step-time model says how long it takes.

An engine is a SimPy process that sleeps from one step end to the next. There it ends the step that has run, passes new
requests to the scheduler, and begins the next step. With `depth` 2 it is one step ahead, as vLLM is with async
scheduling: at a step end the next step already runs, and the engine begins the one after it.

With `fast_forward` the process passes over the ends of steps that change nothing (`twin.serving.fast_forward`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable

import simpy
from simpy.events import Event

from latency_models.step_time import StepTime
from schedulers.batches import Batch, OneShotBatch
from schedulers.engine_core import EngineCore
from schedulers.lockstep import GroupBatch, LockstepGroup
from schedulers.sequence import DECODING, Sequence
from twin.environment import Environment, Priority
from twin.serving.answer_ends import AnswerEnds
from twin.serving.fast_forward import FastForward, RunningStep, Window, cores_of
from twin.serving.machine_speed import MachineSpeed
from twin.serving.overload import Backlog
from twin.serving.records import DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP, UNSET, Counters, EngineLog, RequestRecord
from workloads.errors import BadInput
from workloads.request import Request

Finished = Callable[[RequestRecord, Sequence], None]

Watch = Callable[["Engine", Batch, float, float], None]
"""Called with the engine, a step that it has just begun, and the step's start and end, seconds. It must not change
them."""


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
        machine_speed: of the machine over time; None: constant.

    Attributes:
        name, index: for logs, and for the order of step ends at the same instant.
        core: its scheduler. log: its steps. backlog: requests that wait for their first step.
        failed: whether it is down. process: its SimPy process.
        on_finish: called with the record and the sequence of each finished request, at its last step's end.
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
        machine_speed: MachineSpeed | None = None,
    ) -> None:
        self.name, self.index = name, index
        self.core = make_core()
        self.log = EngineLog(name, detail=detail)
        self.on_finish: Finished = lambda record, sequence: None
        self.failed = False
        self.backlog = Backlog()
        self._env, self._step_time, self._make_core = env, step_time, make_core
        self._depth, self._watch, self._machine_speed = depth, watch, machine_speed
        self._priority = Priority.STEP_END + index
        self._seconds = self._group_seconds if isinstance(self.core, LockstepGroup) else step_time.seconds
        self._inbox: list[Submission] = []
        self._inbox_load = 0
        self._running: deque[RunningStep] = deque()
        self._answer_ends = AnswerEnds()
        self._window: Window | None = None
        self._fast_forward: FastForward | None = None
        if fast_forward:
            self._fast_forward = FastForward(self.log, self._running, self._answer_ends, step_time, machine_speed)
        self._lost_steps = 0  # of the schedulers that were lost in failures
        self._lost_counters = Counters()  # of these schedulers
        self._failed_at = 0.0
        self._wake_up = env.event()
        self.process = env.process(self._run())

    # -- the process -------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[Event, object, None]:
        """Sleep to a step end, or until there is work; end the step; accept requests; begin the next step."""
        env, priority = self._env, self._priority
        while True:
            try:
                yield self._wake_up
            except simpy.Interrupt:  # the engine has failed
                step_end = None
            else:
                step_end = self._visit_step_end(env.now)
                while step_end is not None and env.advance_to(step_end, priority):  # as `yield env.at(...)` would
                    step_end = self._visit_step_end(step_end)
            self._wake_up = env.event() if step_end is None else env.at(step_end, priority)

    def _visit_step_end(self, now: float) -> float | None:
        """End the step that has run, accept requests, and begin the next step. Returns the next step end to visit."""
        self.log.events += 1
        finished: Iterable[Sequence] = ()
        if self._window is not None:
            finished = self._close_window(self._window)
        elif self._running:
            batch, start, end = self._running.popleft()
            finished = self._end_step(batch, start, end)
        for sequence in finished:
            self._finish(sequence, now)
        if self._inbox:
            self._accept_requests(now)
        self._begin_steps(now)
        log, core, window = self.log, self.core, self._window
        if finished or window is None:
            log.running_seqs.set(now, core.num_running_seqs)
        if window is not None:  # its states are logged when it is closed
            return window.end
        if log.detail:
            log.state(now, core.num_running, core.num_waiting, self.free_blocks)
        return self._running[0][2] if self._running else None

    def _notice(self, late: bool) -> None:
        """Have the process notice new work at the next step end, or now if the engine is idle."""
        if not self._wake_up.triggered:
            self._env.at(self._env.now, self._priority, self._wake_up)
        elif self._window is not None and self._window.cut(self._env.now, late):
            self._env.move_forward(self._wake_up, self._window.end, self._priority)

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
        self.backlog.arrive(self._env.now)
        self._inbox.append((record, request, max_tokens, remote_prefill, hold_blocks))
        self._inbox_load += request.prompt_tokens + (max_tokens or request.max_tokens)
        self._notice(late)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence submitted with `hold_blocks`; noticed at the next step end, or now if idle."""
        self.core.release(sequence)
        if self._window is None:
            self.log.state(self._env.now, self.core.num_running, self.core.num_waiting, self.free_blocks)
        if self.core.num_waiting:
            self._notice(late=True)

    @property
    def load(self) -> int:
        """Prompt tokens plus `max_tokens` of its unfinished requests (`EngineCore.outstanding_tokens`)."""
        return self.core.outstanding_tokens + self._inbox_load

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
        """Leading prompt tokens of a request that are in the prefix cache, as of the last step begun."""
        self._allocate_begun_steps()
        return self.core.cached_prefix_tokens(request)

    def _allocate_begun_steps(self) -> None:
        """Bring the KV cache up to the steps of an open window that have begun."""
        window = self._window
        if window is not None:
            self.core.allocate_ahead(min(window.num_ended(self._env.now) + 1, window.num_steps))

    def fail(self) -> list[RequestRecord]:
        """Stop at once and return the records of all unfinished requests, oldest first. Unfinished steps are lost."""
        now = self._env.now
        if self._window is not None and self._fast_forward is not None:
            self._fast_forward.close_early(self.core, self._window, now)
        self._window = None
        lost = [self._abort(sequence, now) for sequence in list(self.core.sequences.values())]
        lost.extend(record for record, *_ in self._inbox)
        self._inbox.clear()
        self._inbox_load = 0
        self._running.clear()
        self._answer_ends.clear()
        self.backlog.lose_all(now)
        if not self.failed:
            self._failed_at = now
        self.failed = True
        self.log.running_seqs.set(now, 0)
        self.log.state(now, 0, 0, self.blocks)
        self.process.interrupt()
        return lost

    def recover(self) -> None:
        """Work again, with an empty cache."""
        self._lost_counters = self.counters
        self.core = self._make_core()
        self._lost_steps = len(self.log.ends)
        self.log.outages.append((self._failed_at, self._env.now))
        self.failed = False

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

    def _close_window(self, window: Window) -> list[Sequence]:
        """End all steps of the window; returns the sequences that finish with it."""
        assert self._fast_forward is not None
        self._window = None
        return self._fast_forward.close(self.core, window)

    def _end_step(self, batch: Batch, start: float, end: float) -> list[Sequence]:
        """End a step that has run; returns the sequences that finish with it."""
        log = self.log
        finished = self.core.end_step(batch, self._answer_ends.pop(batch.step_index), end)
        log.ran(start, end)
        log.step(end, batch.n_decodes - len(batch.transferred))
        if log.detail:
            kind = DECODE_STEP if not batch.chunks else ONE_SHOT_STEP if isinstance(batch, OneShotBatch) else MIXED_STEP
            log.step_details(kind, batch.prefill_tokens, start)
        for chunk in batch.chunks:
            if chunk.last:
                self._first_token(chunk.sequence, end)
        for sequence in batch.transferred:
            record: RequestRecord = sequence.payload  # type: ignore[assignment]
            log.odd_gaps.append(end - record.first_token)
        return finished

    def _first_token(self, sequence: Sequence, end: float) -> None:
        """Note the first token after a prompt was computed, for the first time or again after a preemption."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        if record.first_token == UNSET:
            record.first_token = end
        elif sequence.preempted_step:
            self.log.odd_gaps.append(end - self.log.ends[self._lost_steps + sequence.preempted_step - 1])

    def _finish(self, sequence: Sequence, end: float) -> None:
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        record.last_token = end
        record.output_tokens = min(record.delivered + sequence.num_output_tokens, record.answer_tokens)
        record.preemptions += sequence.preemptions
        record.replica = self.name
        self.on_finish(record, sequence)

    def _accept_requests(self, now: float) -> None:
        """Pass the requests handed in since the last step end to the scheduler."""
        for record, request, max_tokens, remote_prefill, hold_blocks in self._inbox:
            try:
                sequence = self.core.submit(
                    request, now, max_tokens=max_tokens, remote_prefill=remote_prefill, hold_blocks=hold_blocks
                )
            except ValueError as error:
                raise BadInput(str(error), field="engine.num_gpu_blocks") from None
            sequence.payload = record
            if record.queued < 0:
                record.queued = now
        self._inbox.clear()
        self._inbox_load = 0

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
            lasts, speed = seconds(batch), self._machine_speed
            end = start + lasts if speed is None else speed.of_rows(batch.tokens).end(start, lasts)
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
            if chunk.last and sequence.state == DECODING:
                self._answer_ends.expect(sequence, batch.step_index)
        for sequence in batch.transferred:
            self.backlog.start(now)
            self._answer_ends.expect(sequence, batch.step_index - 1)

    def _group_seconds(self, batch: Batch) -> float:
        assert isinstance(batch, GroupBatch)
        return self._step_time.group_seconds(batch)
