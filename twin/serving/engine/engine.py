"""A simulated engine: the scheduler decides each step, a step-time model says how long it takes.

An engine sets its alarm from one step end to the next. There it ends the step that has run, passes new requests to the
scheduler, and begins the next step. With `depth` 2 it is one step ahead, as vLLM is with async
scheduling: at a step end the next step already runs, and the engine begins the one after it.

With `fast_forward` it passes over the ends of steps that change nothing (`twin.serving.engine.fast_forward`).
"""

from __future__ import annotations

from collections.abc import Callable

from latency_models.step_time import StepTime
from schedulers.batches import Batch
from schedulers.parallel_cores import Core, GroupBatch, LockstepGroup
from schedulers.sequence import Sequence, SubmitOptions
from twin.environment import Alarm, Environment, Priority
from twin.serving.engine.engine_state import Answer, EngineOptions, EngineState, Foresight
from twin.serving.engine.fast_forward import FastForward
from twin.serving.engine.links import CacheTraffic
from twin.serving.engine.speculation import DraftedWindows
from twin.serving.records.requests import RequestRecord
from workloads.request import Request

Finished = Callable[[RequestRecord, Sequence], None]


class Engine(EngineState):
    """One engine of the simulated system.

    Args:
        env: the simulation's environment.
        make_core: makes the engine's scheduler, at the start and after each failure.
        step_time: gives the durations of steps.

    Attributes:
        foresight: until when no request comes to it; None if that is not known.
        on_finish: called with the record and the sequence of each finished request, at its last step's end.
    """

    def __init__(
        self, env: Environment, make_core: Callable[[], Core], step_time: StepTime, options: EngineOptions
    ) -> None:
        super().__init__(env, make_core, options)
        self.on_finish: Finished = lambda record, sequence: None
        self.foresight: Foresight | None = None
        self._step_time = step_time
        self._depth = options.depth
        self._watch = options.watch
        self._free_at = self._failed_at = 0.0
        self._alarm = Alarm(Priority.STEP_END + options.index, self._wake_up)
        self._seconds = self._group_seconds if isinstance(self.core, LockstepGroup) else step_time.seconds
        self._sheds = any(core.admission_control is not None for core in self.cores)
        self._fast_forward: FastForward | None = None
        if options.fast_forward:
            parts, speculation = (self.log, self._running, self.step_records.answer_ends, step_time), self.speculation
            if speculation is not None and speculation.acceptance.measured is None:
                self._fast_forward = DraftedWindows(*parts, speculation)
            else:  # measured outcomes are looked up step by step
                self._fast_forward = FastForward(*parts)
        if options.view is not None or self.tier_links is not None:
            self._cache_traffic = CacheTraffic(env, options.view, self.tier_links, self._notice_load)
            self._cache_traffic.follow(self.core)

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
            foresight = self.foresight  # Python 3.11 is slow to call an instance's attribute
            no_request_before, next_end = foresight(), step_end
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
        if self._reservations or (self._sheds and self._requests):
            return True
        for _, request, options in self._requests:
            if not (options.max_tokens or request.max_tokens):  # it counts for a token more once the scheduler has it
                return True
        if self._window is not None:
            return self._window.finishes
        if self.speculation is not None:
            return True
        if self._running:
            batch = self._running[0][0]
            return bool(batch.finishing) or self.step_records.answer_ends.may_end(batch.step_index)
        return False

    def _visit_step_end(self, now: float) -> float | None:
        """End the step that has run, accept requests, and begin the next step. Returns the next step end to visit."""
        self.log.events += 1
        finished = self._end_steps(now)
        for sequence in finished:
            self.on_finish(self.step_records.finish(sequence, now), sequence)
        traffic = self._cache_traffic
        if traffic is not None:
            traffic.finish_loads()
            traffic.begin_copies(computed=True)
        if self._requests or self._reservations:
            self._accept(now)
            self._note_load()
        elif finished:
            self._note_load()
        holds = len(finished) > 0 and now < self._free_at
        if not holds:
            self._begin_steps(now)
            if traffic is not None:
                traffic.begin_copies(computed=False)
        log, core, window = self.log, self.core, self._window
        if finished or window is None:
            log.running_seqs.set(now, core.num_running_seqs)
        if window is not None:  # its states are logged when it is closed
            return window.end
        if log.detail:
            log.state(now, core.num_running, core.num_waiting, self.free_blocks)
        idle_until = self._free_at if holds else None
        return self._running[0][2] if self._running else idle_until

    def _notice(self, now: float, late: bool) -> None:
        """Have the engine notice new work at the next step end, or now if it is idle."""
        if not self._alarm.is_set:
            self._sleep_until(now)
        elif self._window is not None and self._window.cut(now, late):
            self._sleep_until(self._window.end)
        elif self.foresight is not None:
            self._sleep_until(self._alarm.when)

    def _notice_load(self) -> None:
        self._notice(self._env.now, late=True)

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
            max_tokens, remote_prefill, hold_blocks: see `SubmitOptions`.
            late: the step ends of this instant are over (see `Priority.LATE`).
        """
        request = request or record.request
        now = self._env.now
        self.backlog.arrive(now)
        options = SubmitOptions(max_tokens, remote_prefill, hold_blocks, never_shed=record.attempts > 0)
        self._requests.append((record, request, options))
        if not (remote_prefill and request.id in self.core.reserved):  # whose load the scheduler counts already
            self._coming_load += request.prompt_tokens + (max_tokens or request.max_tokens)
        self._note_load()
        self._notice(now, late)

    def reserve(self, record: RequestRecord, answer: Answer) -> None:
        """Reserve blocks for a prompt that a prefill engine computes (`EngineCore.reserve`).

        It is decided at the next step end, or now if the engine is idle. A request that is in the scheduler by then
        needs nothing reserved.
        """
        self._reservations.append((record, answer))
        self._coming_load += record.request.prompt_tokens + record.request.max_tokens
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

    def fail(self) -> list[RequestRecord]:
        """Stop at once and return the records of all unfinished requests, oldest first. Unfinished steps are lost."""
        now = self._env.now
        if self._window is not None and self._fast_forward is not None:
            self._allocate_begun_steps()
            self._fast_forward.close_early(self.core, self._window, now)
        self._window = None
        for number in list(self.core.reserved):  # their prompts are still being computed
            self.core.abort(number, now)
        records = [self._abort(sequence, now) for sequence in list(self.core.sequences.values())]
        records += [record for record, _, _ in self._requests]
        self._requests.clear()
        self._reservations.clear()
        self._coming_load = 0
        if self._cache_traffic is not None:
            self._cache_traffic.lose_loads()
        self._running.clear()
        self.step_records.lose_all(now)
        if not self.failed:
            self._failed_at = now
        self.failed = True
        self.log.running_seqs.set(now, 0)
        self.log.state(now, 0, 0, self.blocks)
        self._alarm.unset()
        return records

    def recover(self) -> None:
        """Work again, with an empty cache."""
        self.restart()
        self.log.outages.append((self._failed_at, self._env.now))
        self.failed = False

    def restart(self) -> None:
        """Have a new scheduler, with an empty cache. The engine has no requests."""
        self._running.clear()  # with async scheduling, a step may have begun before the last answer ended
        self.step_records.restart()
        self._alarm.unset()
        self._lost_counters = self.counters
        self.core = self._new_core()
        if self._cache_traffic is not None:
            self._cache_traffic.follow(self.core)

    def _abort(self, sequence: Sequence, now: float) -> RequestRecord:
        """Take a sequence out of the scheduler, with the tokens of the steps that have ended."""
        self.core.abort(sequence.request.id, now)
        discarded = sum(batch.has_output(sequence) for batch, _, _ in self._running)
        return self.step_records.abort(sequence, sequence.num_output_tokens - discarded)

    def _end_steps(self, now: float) -> list[Sequence]:
        """End the window or the step that has run; returns the sequences that finish with it."""
        if self._cache_traffic is not None:
            self._cache_traffic.end_steps(self.core, self._window, now)
        window = self._window
        if window is not None and self._fast_forward is not None:
            self._window = None
            return self._fast_forward.close(self.core, window)
        if not self._running:
            return []
        batch, start, end = self._running.popleft()
        return self._end_step(batch, start, end)

    def _end_step(self, batch: Batch, start: float, end: float) -> list[Sequence]:
        records, speculation = self.step_records, self.speculation
        if speculation is None:
            stopped = records.answer_ends.pop(batch.step_index)
        else:
            stopped = speculation.stopped(self.core, batch)
        finished = self.core.end_step(batch, stopped, end)
        records.end(batch, start, end)
        return finished

    def _begin_steps(self, now: float) -> None:
        """Begin steps until `depth` of them run, or open a window."""
        running, free_places = self._running, self._depth - len(self._running)
        seconds = self._seconds  # Python 3.11 is slow to call an instance's attribute
        while free_places:
            if free_places == 1 and self._fast_forward is not None and not self.step_records.notes_pauses:
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
            if batch.chunks or batch.transferred or batch.paused or self.step_records.notes_pauses:
                self.step_records.begin(batch, now)
            free_places -= 1

    def _group_seconds(self, batch: Batch) -> float:
        assert isinstance(batch, GroupBatch)
        return self._step_time.group_seconds(batch)
