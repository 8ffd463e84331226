"""One simulated engine: the scheduler decides, a latency model says how long, the clock moves.

An engine is woken at its step boundaries. There it ends the step that has run, takes in what has arrived, and begins
the next. With `depth` 2 it is one step ahead, as vLLM is with async scheduling: at a boundary the next step already
runs, and what is decided is the one after.

While nothing can change, boundaries are not visited. The scheduler says for how many steps its batch keeps its members
(`quiet_steps`), the plant knows when the next answer ends, the latency model gives all durations at once, and the
engine
sleeps to the last of those boundaries: a window. An arrival cuts the window at the boundary that would have noticed it.
Times are summed in the same order either way, so records agree to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate

from latency_models.step_time import StepTime, group_decode_seconds, group_seconds
from schedulers.batches import Batch, OneShotBatch
from schedulers.engine_core import EngineCore
from schedulers.lockstep import GroupBatch, LockstepGroup
from schedulers.sequence import DECODING, WAITING, Sequence
from twin.clock import Clock
from twin.serving.pace import Pace
from twin.serving.records import DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP, UNSET, EngineLog, RequestRecord
from workloads.errors import BadInput
from workloads.request import Request

LONGEST_WINDOW = 1024
"""Steps. What an arrival cuts off a window has been computed for nothing."""

BOUNDARY_RANK = 16
"""Step boundaries come after arrivals at the same instant, engine by engine."""

LATE_RANK = 1 << 20
"""What a boundary brings about at its own instant (a client's next request, the end of an instant transfer) comes after
all boundaries of that instant, so that the order does not depend on which of them are visited."""

Finished = Callable[[RequestRecord, Sequence], None]

Watch = Callable[["Engine", Batch, float, float], None]
"""Called with the engine and a step that it has just begun, the step's start and its end, seconds. It only looks."""


class Engine:
    """One engine of the twin.

    Attributes:
        name, index: for logs and for the order of simultaneous boundaries. core: its scheduler. log: its steps.
        on_finish: called with the record and the sequence of whoever finished, at the boundary of its last step.
    """

    def __init__(
        self,
        clock: Clock,
        make_core: Callable[[], EngineCore | LockstepGroup],
        step_time: StepTime,
        *,
        name: str,
        index: int,
        depth: int = 1,
        fast_forward: bool = True,
        detail: bool = True,
        watch: Watch | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.name, self.index = name, index
        self.core = make_core()
        self.log = EngineLog(name, detail=detail)
        self.on_finish: Finished = lambda record, sequence: None
        self.failed = False
        self._clock, self._step_time, self._make_core = clock, step_time, make_core
        self._depth, self._fast, self._watch = depth, fast_forward, watch
        self._rank = BOUNDARY_RANK + index
        in_lockstep = isinstance(self.core, LockstepGroup)
        self._pace = pace
        self._seconds = self._group_seconds if in_lockstep else step_time.seconds
        self._durations = self._group_durations if in_lockstep else self._own_durations
        self._alarm: int | None = None
        self._inbox: list[tuple[RequestRecord, Request, int | None, bool, bool]] = []
        self._inbox_load = 0
        self._running: deque[tuple[Batch, float, float]] = deque()  # steps begun, with their starts and ends
        self._window: list[float] = []
        self._steps = 0  # of the window, as far as it has not been cut
        self._with_last = False  # whether the window's last step is the one with which somebody ends
        self._opened = 0.0  # when the window's first step began
        self._stops: list[tuple[int, int, Sequence, int]] = []
        self._forgotten = 0  # steps of cores that were lost in failures

    # -- for the system around it ------------------------------------------------------------------------------------

    def submit(
        self,
        record: RequestRecord,
        request: Request | None = None,
        *,
        limit: int | None = None,
        computed: bool = False,
        hold: bool = False,
        late: bool = False,
    ) -> None:
        """Hand in a request; it is noticed at the next boundary, or now if the engine sleeps. Options: `EngineCore`.

        `late`: boundaries of this very instant are over (see `LATE_RANK`).
        """
        request = request or record.request
        self._inbox.append((record, request, limit, computed, hold))
        self._inbox_load += request.prompt_tokens + (limit or request.max_tokens)
        if self._alarm is None:
            self._set_alarm(self._clock.now)
        elif self._steps > 1:
            self._cut(self._clock.now, late)

    @property
    def load(self) -> int:
        """Prompt tokens and output limits of the requests that it has and has not finished (`EngineCore.load`)."""
        return self.core.load + self._inbox_load

    @property
    def cores(self) -> list[EngineCore]:
        """Its scheduler, or those of its data-parallel ranks."""
        return self.core.ranks if isinstance(self.core, LockstepGroup) else [self.core]

    @property
    def blocks(self) -> int:
        """KV blocks that it has."""
        return sum(core.kv.blocks for core in self.cores)

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds, as of the last step begun."""
        return sum(core.kv.free for core in self.cores)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence submitted with `hold`: seen at the next boundary, or now if it sleeps."""
        self.core.release(sequence)
        if not self.core.waiting:
            return
        if self._alarm is None:
            self._set_alarm(self._clock.now)
        elif self._steps > 1:
            self._cut(self._clock.now, late=True)

    def fail(self) -> list[RequestRecord]:
        """Stop at once. Steps that have not ended never happened. Returns the records of all it had, oldest first."""
        now = self._clock.now
        if self._window:
            self._steps, self._with_last = self._advanced(), False
            if self._steps:
                self._close_window()
        self._window, self._steps = [], 0
        lost: list[RequestRecord] = []
        begun = self.core.tick - len(self._running)
        for sequence in list(self.core.sequences.values()):
            record: RequestRecord = sequence.payload  # type: ignore[assignment]
            self.core.abort(sequence.request.id, now)
            if sequence.left > begun:
                sequence.generated -= sequence.left - begun
            record.delivered += max(sequence.generated, 0)
            lost.append(record)
        lost.extend(record for record, *_ in self._inbox)
        self._inbox.clear()
        self._inbox_load = 0
        self._running.clear()
        self._stops.clear()
        self._alarm, self.failed = None, True
        return lost

    def recover(self) -> None:
        """Work again, with nothing in the cache."""
        self.core = self._make_core()
        self._forgotten = len(self.log.ends)
        self.failed = False

    # -- boundaries --------------------------------------------------------------------------------------------------

    def _set_alarm(self, when: float) -> None:
        self._alarm = self._clock.call(when, self._rank, self._boundary)

    def _boundary(self, number: int) -> None:
        if number != self._alarm:  # a window was cut, or the engine failed: another alarm counts
            return
        self._alarm = None
        clock, log, running = self._clock, self.log, self._running
        while True:
            log.events += 1
            now = clock.now
            if self._window:
                self._close_window()
            elif running:
                self._end(*running.popleft())
            if self._inbox:
                self._take_in(now)
            when = self._begin(now)
            if when is None:
                return
            if not clock.pass_to(when, self._rank):
                self._set_alarm(when)
                return
            self._alarm = None  # whatever was handed in meanwhile has been taken in

    def _take_in(self, now: float) -> None:
        for record, request, limit, computed, hold in self._inbox:
            try:
                sequence = self.core.submit(request, now, limit=limit, computed=computed, hold=hold)
            except ValueError as error:
                raise BadInput(str(error), field="engine.kv_blocks") from None
            sequence.payload = record
            if record.queued < 0:
                record.queued = now
        self._inbox.clear()
        self._inbox_load = 0

    def _begin(self, now: float) -> float | None:
        """Begin steps until the pipeline is full, or open a window. Returns the next boundary; None: there is none."""
        running, space = self._running, self._depth - len(self._running)
        seconds = self._seconds  # Python 3.11 is slow to call what is an instance's attribute
        while space:
            if space == 1 and self._fast and self._open_window(now):
                return self._window[self._steps - 1]
            batch = self.core.begin_step(now)
            if batch is None:
                break
            start = running[-1][2] if running else now
            lasts = seconds(batch)
            end = start + lasts if self._pace is None else self._pace.of_rows(batch.tokens).end(start, lasts)
            running.append((batch, start, end))
            if self._watch is not None:
                self._watch(self, *running[-1])
            if batch.chunks or batch.arrived:
                self._note_beginners(batch, now)
            space -= 1
        return running[0][2] if running else None

    def _note_beginners(self, batch: Batch, now: float) -> None:
        for chunk in batch.chunks:
            record: RequestRecord = chunk.sequence.payload  # type: ignore[assignment]
            if record.scheduled < 0:
                record.scheduled = now
                record.cached_tokens = chunk.sequence.cached
            if chunk.last and chunk.sequence.state == DECODING:
                self._expect_stop(chunk.sequence, batch.tick)
        for sequence in batch.arrived:
            self._expect_stop(sequence, batch.tick - 1)

    def _expect_stop(self, sequence: Sequence, tick: int) -> None:
        """Remember at which step the answer of a decoding sequence ends, if that is before its limit."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        answer = record.answer_tokens - record.delivered
        if answer < sequence.limit and sequence.state == DECODING:
            heappush(self._stops, (tick + answer - sequence.generated, sequence.number, sequence, sequence.joined))

    def _end(self, batch: Batch, start: float, end: float) -> None:
        stopped = self._due(batch.tick) if self._stops else ()
        finished = self.core.end_step(batch, stopped, end)
        log = self.log
        log.busy += end - start
        log.step(end, batch.n_decodes - len(batch.arrived))
        if log.detail:
            kind = DECODE_STEP if not batch.chunks else ONE_SHOT_STEP if isinstance(batch, OneShotBatch) else MIXED_STEP
            self._log_details(kind, batch.prefill_tokens, start)
        for chunk in batch.chunks:
            if chunk.last:
                self._first_token(chunk.sequence, end)
        for sequence in batch.arrived:
            record: RequestRecord = sequence.payload  # type: ignore[assignment]
            log.odd_gaps.append(end - record.first_token)
        for sequence in finished:
            self._finish(sequence, end)

    def _first_token(self, sequence: Sequence, end: float) -> None:
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        if record.first_token == UNSET:
            record.first_token = end
        elif sequence.lost:
            self.log.odd_gaps.append(end - self.log.ends[self._forgotten + sequence.lost - 1])

    def _finish(self, sequence: Sequence, end: float) -> None:
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        record.last_token = end
        record.output_tokens = min(record.delivered + sequence.generated, record.answer_tokens)
        record.preemptions += sequence.preemptions
        record.replica = self.name
        self.on_finish(record, sequence)

    def _log_details(self, kind: int, prefill_tokens: int, start: float) -> None:
        log, core = self.log, self.core
        log.index.append(len(log.ends) - 1)
        log.starts.append(start)
        log.prefill_tokens.append(prefill_tokens)
        log.kinds.append(kind)
        log.changes.extend((log.ends[-1], core.admitted, core.waiting, self.free_blocks))

    def _due(self, tick: int) -> list[Sequence]:
        """Whose answers end with the step of that tick: also of those who lost their cache while it was under way."""
        due, stops = [], self._stops
        while stops and stops[0][0] <= tick:
            when, _, sequence, joined = heappop(stops)
            if sequence.joined == joined or (sequence.lost == when and self._answered(sequence)):
                due.append(sequence)
        return due

    def _answered(self, sequence: Sequence) -> bool:
        """Whether a sequence lost its cache while the step was under way that gave the last token of its answer."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        return sequence.state == WAITING and sequence.generated == record.answer_tokens - record.delivered

    # -- windows -----------------------------------------------------------------------------------------------------

    def _open_window(self, now: float) -> bool:
        """Fast-forward from here if at least two steps are quiet. With a step in flight, that one must be quiet too.

        Without one, the step after the last quiet one has the same members and is passed over as well: someone ends
        with it, and that boundary has to be visited anyway.
        """
        steps = self.core.quiet_steps()
        if steps < 2:
            return False
        core, running = self.core, self._running
        if self._stops:
            steps = min(steps, self._next_stop() - core.tick - 1)
        if steps > LONGEST_WINDOW:
            steps = LONGEST_WINDOW
        end = now
        if running:
            batch, _, end = running[0]
            if batch.ending or batch.chunks or batch.arrived or (self._stops and self._next_stop() <= batch.tick):
                return False
        if steps < 2:
            return False
        self._with_last = not running and core.lasts(steps + 1)
        steps += self._with_last
        durations_of = self._durations
        add = None if self._pace is None else self._pace.of_rows(core.decodes).end
        window = list(accumulate(durations_of(steps), add, initial=end))
        if not running:
            del window[0]
        self._window, self._steps, self._opened = window, steps, now
        return True

    def _own_durations(self, steps: int) -> list[float]:
        """Of the coming decode steps, seconds."""
        assert isinstance(self.core, EngineCore)
        return self._step_time.decode_seconds(*run_of(self.core), steps)

    def _group_durations(self, steps: int) -> list[float]:
        """As `_own_durations`, of ranks in lockstep."""
        assert isinstance(self.core, LockstepGroup)
        return group_decode_seconds(self._step_time, [run_of(rank) for rank in self.core.ranks], steps)

    def _group_seconds(self, batch: Batch) -> float:
        assert isinstance(batch, GroupBatch)
        return group_seconds(self._step_time, batch)

    def _next_stop(self) -> int:
        stops = self._stops
        while stops and stops[0][2].joined != stops[0][3]:
            heappop(stops)
        return stops[0][0] if stops else self.core.tick + LONGEST_WINDOW

    def _cut(self, now: float, late: bool) -> None:
        """End the window at the next boundary: one at this very instant is next unless it is `late`."""
        steps = (bisect_right if late else bisect_left)(self._window, now, 0, self._steps) + 1
        if steps < self._steps:
            self._steps, self._with_last = steps, False
            self._set_alarm(self._window[steps - 1])

    def _advanced(self) -> int:
        """Steps of the open window that have ended by now, as far as the scheduler has not been told of them."""
        return bisect_left(self._window, self._clock.now, 0, self._steps) if self._window else 0

    def _close_window(self) -> None:
        """The scheduler is told of the steps up to the boundary at which the window ends."""
        ends, steps, core, log = self._window, self._steps, self.core, self.log
        self._window, self._steps = [], 0
        size = core.decodes
        if self._running:
            batch, start, end = self._running.popleft()
            core.advance(steps)
            log.step(end, batch.n_decodes)
            log.steps(ends[1:steps], size)
            log.busy += ends[steps - 1] - start
            self._running.append((core.standing_batch(), ends[steps - 1], ends[steps]))
            return
        log.steps(ends[:steps] if steps < len(ends) else ends, size)
        end = ends[steps - 1]
        log.busy += end - self._opened
        if not self._with_last:
            core.advance(steps)
            return
        core.advance(steps - 1)
        finished = core.last_step(self._due(core.tick + 1) if self._stops else ())
        if log.detail:
            self._log_details(DECODE_STEP, 0, ends[steps - 2])
        for sequence in finished:
            self._finish(sequence, end)


def run_of(core: EngineCore) -> tuple[int, int, int]:
    """Decodes, the tokens that they attend to, and the most that one does, in the coming decode step."""
    cohort = core.cohort
    return cohort.size, cohort.kv + cohort.size, cohort.longest() + 1
