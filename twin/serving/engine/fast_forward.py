"""Steps of an engine: the records that they leave, and fast-forwarding, which makes many decode steps one event.

The simulator knows the length of every answer, and so the step at which it ends (`AnswerEnds`); the scheduler does not.

While an engine only decodes, nothing changes from step to step until an answer ends or a request arrives. The scheduler
says for how many steps its batch keeps its members (`steady_decode_steps`), `AnswerEnds` when the next answer ends, and
the step-time model gives the durations of all steps at once. The engine then sleeps to the last of these step ends: a
window. An arrival cuts the window at the step end that would have noticed it.

Times are summed in the same order as step by step, so the records of both agree to the last bit.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain
from typing import Final

from latency_models.step_time import StepTime, decode_line
from schedulers.batches import Batch, OneShotBatch
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import Core, LockstepGroup
from schedulers.sequence import DECODING, WAITING, Sequence
from twin.serving.records.engine_log import DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP, Backlog, EngineLog
from twin.serving.records.requests import UNSET, RequestRecord

NEVER: Final = sys.maxsize
"""A step index that no step reaches."""


class AnswerEnds:
    """Decoding sequences of one engine whose answers end before `max_tokens`, ordered by the step that ends them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence, int]] = []  # step index, tie-breaker, sequence, its joined_step
        self._longest = 64  # entries from which on those of decodes that have paused since are dropped

    def expect(self, sequence: Sequence, step_index: int) -> None:
        """Add a sequence that decodes from the step after `step_index` on."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        answer = record.answer_tokens - record.delivered
        if answer < sequence.max_tokens and sequence.state == DECODING:
            last_step = step_index + answer - sequence.num_output_tokens
            heappush(self._heap, (last_step, sequence.seq_id, sequence, sequence.joined_step))
            if len(self._heap) > self._longest:
                self._heap = [entry for entry in self._heap if entry[2].joined_step in (entry[3], -1)]
                heapify(self._heap)
                self._longest = 2 * len(self._heap) + 64

    def next_step(self) -> int:
        """The next step index at which an answer ends; `NEVER` if there is none."""
        heap = self._heap
        while heap and heap[0][2].joined_step != heap[0][3]:  # it has been preempted since
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def may_end(self, step_index: int) -> bool:
        """Tell whether an answer may end by step `step_index`; one that was preempted since counts as well."""
        return bool(self._heap) and self._heap[0][0] <= step_index

    def pop(self, step_index: int) -> list[Sequence]:
        """Remove and return the sequences whose answers end with step `step_index`, also if preempted while it ran."""
        sequences: list[Sequence] = []
        heap = self._heap
        while heap and heap[0][0] <= step_index:
            last_step, _, sequence, joined = heappop(heap)
            if sequence.joined_step == joined or (sequence.preempted_step == last_step and _has_whole_answer(sequence)):
                sequences.append(sequence)
        return sequences

    def clear(self) -> None:
        self._heap.clear()


def _has_whole_answer(sequence: Sequence) -> bool:
    """Tell whether a preempted sequence waits although its answer is complete."""
    record: RequestRecord = sequence.payload  # type: ignore[assignment]
    return sequence.state == WAITING and sequence.num_output_tokens == record.answer_tokens - record.delivered


OnChunk = Callable[[Sequence, int], None]


class StepRecords:
    """Notes the steps of one engine.

    Args:
        log: of the engine. deliver: seconds from the end of a step until clients have its tokens.
        expects_ends: whether answers end at steps that are known when their decodes begin, as without speculation.

    Attributes:
        backlog: requests that wait for their first step. answer_ends: the steps at which answers end.
        on_chunk: called with the sequence of each chunk that is not its prompt's last, and the tokens computed with it:
            -1 when its step begins and the number when it ends; None for nothing.
        lost_steps: of the schedulers that were lost in failures.
    """

    def __init__(self, log: EngineLog, deliver: float, expects_ends: bool) -> None:
        self.log = log
        self.deliver = deliver
        self.expects_ends = expects_ends
        self.backlog = Backlog()
        self.answer_ends = AnswerEnds()
        self.on_chunk: OnChunk | None = None
        self.lost_steps = 0
        # Of prompts that are computed again: the step of the token before. They may be preempted once more meanwhile.
        self._step_before: dict[Sequence, int] = {}
        self._paused: dict[Sequence, int] = {}  # and the step of the token before
        self._resumed: dict[int, list[int]] = {}  # by the step that goes on with decodes, their steps before it

    @property
    def notes_pauses(self) -> bool:
        """Whether steps of decodes alone are to be noted one by one, since some of them have paused."""
        return len(self._paused) > 0 or len(self._resumed) > 0

    def begin(self, batch: Batch, now: float) -> None:
        """Note the sequences whose first step or first decode begins, and those that pause or go on."""
        if self._paused or batch.paused:
            self._pause_and_resume(batch)
        for chunk in batch.chunks:
            sequence = chunk.sequence
            record: RequestRecord = sequence.payload  # type: ignore[assignment]
            if chunk.context == sequence.num_cached_tokens and not sequence.preemptions:
                self.backlog.start(now)
            if record.scheduled < 0:
                record.scheduled = now
                record.cached_tokens = sequence.num_cached_tokens
            self._paused.pop(sequence, None)
            if chunk.last and sequence.preempted_step:
                self._step_before[sequence] = sequence.preempted_step
            if chunk.last and sequence.state == DECODING and self.expects_ends:
                self.answer_ends.expect(sequence, batch.step_index)
            if self.on_chunk is not None and not chunk.last:
                self.on_chunk(sequence, -1)
        for sequence in batch.transferred:
            self.backlog.start(now)
            if self.expects_ends:
                self.answer_ends.expect(sequence, batch.step_index - 1)

    def _pause_and_resume(self, batch: Batch) -> None:
        """Note decodes that go on after a pause, and those that a step passes over, whose answers end later."""
        steps = [self._paused.pop(sequence) for sequence in batch.decodes if sequence in self._paused]
        if steps:
            self._resumed[batch.step_index] = steps
        for sequence in batch.paused:
            self._paused.setdefault(sequence, batch.step_index - 1)
            if sequence.state == DECODING and self.expects_ends:
                self.answer_ends.expect(sequence, batch.step_index)

    def end(self, batch: Batch, start: float, end: float) -> None:
        """Note a step that has run, and the tokens that it has computed."""
        log = self.log
        log.ran(start, end)
        resumed = self._resumed.pop(batch.step_index, ()) if self._resumed else ()
        for step in resumed:
            log.odd_gaps.append(end - self.end_of_step(step))
        log.step(end, batch.n_decodes - len(batch.transferred) - len(resumed))
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
            log.odd_gaps.append(end + self.deliver - record.first_token)

    def _first_token(self, sequence: Sequence, end: float) -> None:
        """Note the first token after a prompt was computed, for the first time or again after a preemption."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        before = self._step_before.pop(sequence, 0) if self._step_before else 0
        if record.first_token == UNSET:
            record.first_token = end + self.deliver
        elif before:
            self.log.odd_gaps.append(end - self.end_of_step(before))

    def end_of_step(self, step: int) -> float:
        """When a step of the present scheduler ended, seconds. `step`: its `Batch.step_index`."""
        return self.log.end_of(self.lost_steps + step - 1)

    def finish(self, sequence: Sequence, end: float) -> RequestRecord:
        """Note a finished request in its record, which is returned."""
        self._paused.pop(sequence, None)
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        record.last_token = end + self.deliver
        record.output_tokens = min(record.delivered + sequence.num_output_tokens, record.answer_tokens)
        record.preemptions += sequence.preemptions
        record.replica = self.log.name
        return record

    def abort(self, sequence: Sequence, tokens: int) -> RequestRecord:
        """Note the `tokens` that a request has when its engine fails in its record, which is returned."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        record.delivered += max(tokens, 0)
        record.preemptions += sequence.preemptions
        return record

    def lose_all(self, now: float) -> None:
        """Forget the requests of an engine that has failed."""
        self.answer_ends.clear()
        self._step_before.clear()
        self._paused.clear()
        self._resumed.clear()
        self.backlog.lose_all(now)

    def restart(self) -> None:
        """Begin with a new scheduler, which counts its steps from 0."""
        self.answer_ends.clear()
        self.lost_steps = self.log.num_steps


SHORT_WINDOW = 32
"""Steps that a window may always have. Beyond, it has at most twice as many as the one before it ran, since steps that
an arrival cuts off are wasted work."""

RunningStep = tuple[Batch, float, float]
"""A step that has begun, its start and its end, seconds."""


class Window:
    """Steps that are passed over in one event.

    Attributes:
        opened: when the window was opened, seconds. ends: when its steps end, seconds. With a step running at `opened`,
            the first entry is the end of that step, and one more entry than `num_steps` is known.
        num_steps: steps that end by the window's end. end: when the last of them ends, seconds.
        finishes: whether a sequence finishes with the last step.
        allocated: first steps whose blocks were allocated one step after the other, for observers of the cache.
        logged: first steps whose states have been logged.
    """

    __slots__ = ("allocated", "end", "ends", "finishes", "logged", "num_steps", "opened")

    def __init__(self, opened: float, ends: list[float], num_steps: int, finishes: bool) -> None:
        self.opened = opened
        self.ends = ends
        self.num_steps = num_steps
        self.finishes = finishes
        self.end = ends[num_steps - 1]
        self.allocated = self.logged = 0

    def num_ended(self, now: float) -> int:
        """Steps that have ended before `now`."""
        return bisect_left(self.ends, now, 0, self.num_steps)

    def num_begun(self, now: float) -> int:
        """Steps that have begun before `now`, of those that end by the window's end."""
        return min(self.num_ended(now) + 1, self.num_steps)

    def cut(self, now: float, late: bool) -> bool:
        """End the window with the next step end; whether that shortens it.

        A step end at this very instant is the next one, unless `late` (see `Priority.LATE`).
        """
        num_steps = (bisect_right if late else bisect_left)(self.ends, now, 0, self.num_steps) + 1
        shorter = num_steps < self.num_steps
        if shorter:
            self.num_steps = num_steps
            self.end = self.ends[num_steps - 1]
            self.finishes = False
        return shorter


class FastForward:
    """Opens and closes the windows of one engine, with which it shares its log, running steps and answers' ends."""

    def __init__(
        self, log: EngineLog, running: deque[RunningStep], answer_ends: AnswerEnds, step_time: StepTime
    ) -> None:
        self._log = log
        self._running = running
        self._answer_ends = answer_ends
        self._step_time = step_time
        self._decode_line = decode_line(step_time)
        self._longest = SHORT_WINDOW  # steps that the next window may have

    def open(self, core: Core, now: float) -> Window | None:
        """A window from now on if the next two steps, and the one that runs, change nothing; else None.

        Without a running step, the step after the last steady one belongs to the window too: it has the same members,
        and a sequence finishes with it, so its end is visited anyway.
        """
        steps = core.steady_decode_steps()
        if steps < 2:
            return None
        next_end = self._answer_ends.next_step()
        steps = min(steps, next_end - core.step_index - 1, self._longest)
        if steps < 2:
            return None
        running, start = self._running, now
        if running:
            batch, _, start = running[0]
            if batch.finishing or batch.chunks or batch.transferred or next_end <= batch.step_index:
                return None
        finishes = not running and core.has_blocks_for_steps(steps + 1)
        steps += finishes
        ends = self._step_ends(core, start, steps)
        if running:
            ends.insert(0, start)
        return Window(now, ends, steps, finishes)

    def _step_ends(self, core: Core, start: float, steps: int) -> list[float]:
        """Ends of the next `steps` steps, if the first begins at `start` and all of them decode the same sequences."""
        if self._decode_line is not None and isinstance(core, EngineCore) and core.model_slots is None:
            decodes = core.decode_set.size
            fixed, slope = self._decode_line(decodes)
            end, first = start, core.decode_set.kv_tokens + decodes
            return [end := end + (fixed + slope * kv) for kv in range(first, first + decodes * steps, decodes)]
        ends = list(accumulate(steady_step_seconds(core, self._step_time, steps), initial=start))
        del ends[0]
        return ends

    def close(self, core: Core, window: Window) -> list[Sequence]:
        """Log the window's steps, advance the scheduler to its end, and return the sequences that finish with it."""
        self._longest = max(SHORT_WINDOW, 2 * window.num_steps)
        if self._log.detail:
            self._log_states(core, window, window.num_steps)
        return self._advance(core, window)

    def close_early(self, core: Core, window: Window, now: float) -> None:
        """Close the window when the engine fails: steps that have not ended by `now` are lost."""
        window.num_steps = window.num_ended(now)
        window.finishes = False
        window.end = window.ends[window.num_steps - 1]
        if self._log.detail:
            self._log_states(core, window, window.num_steps + 1)
        if window.num_steps:
            self._advance(core, window)

    def _advance(self, core: Core, window: Window) -> list[Sequence]:
        if self._running:
            self._advance_ahead(core, window)
            return []
        steps, ends, end, log = window.num_steps, window.ends, window.end, self._log
        log.steps(ends[:steps] if steps < len(ends) else ends, core.num_decodes)
        log.ran(window.opened, end)
        finished = self._run(core, steps, window.finishes)
        if window.finishes:
            log.step_details(DECODE_STEP, 0, ends[steps - 2] if steps > 1 else window.opened)
        return finished

    def _run(self, core: Core, steps: int, finishes: bool) -> list[Sequence]:
        """Have the scheduler run so many steps; returns the sequences that finish with the last, if some do."""
        if not finishes:
            core.advance(steps)
            return []
        core.advance(steps - 1)
        return core.run_decode_step(self._answer_ends.pop(core.step_index + 1))

    def _advance_ahead(self, core: Core, window: Window) -> None:
        """Advance over a window that was opened while a step ran. Afterwards the step after the window's end runs."""
        batch, start, end = self._running.popleft()
        steps, ends, log, size = window.num_steps, window.ends, self._log, core.num_decodes
        core.advance(steps)
        log.step(end, batch.n_decodes)
        log.steps(ends[1:steps], size)
        log.ran(start, window.end)
        self._running.append((core.current_decode_batch(), window.end, ends[steps]))

    def log_begun_steps(self, core: Core, window: Window, now: float) -> None:
        """Log the states of steps that have begun, before blocks are freed that are not of these steps."""
        if self._log.detail:
            self._log_states(core, window, window.num_begun(now))
            window.logged = window.num_begun(now)

    def _log_states(self, core: Core, window: Window, num_steps: int) -> None:
        """Log free blocks at the start of the window's first `num_steps` steps, as if each had been visited."""
        cores = cores_of(core)
        free = sum(rank.kv_cache.num_free_blocks + rank.blocks_allocated_ahead for rank in cores)
        allocated = core.num_new_blocks_by_step(num_steps)
        starts = chain((window.opened,), window.ends)
        running, waiting = core.num_running, core.num_waiting
        for i, (start, blocks) in enumerate(zip(starts, allocated, strict=False)):
            free -= blocks
            if i == window.logged or (blocks and i > window.logged):
                self._log.state(start, running, waiting, free)


def cores_of(core: Core) -> list[EngineCore]:
    """The scheduler itself, or those of its data-parallel ranks."""
    return core.ranks if isinstance(core, LockstepGroup) else [core]


def steady_step_seconds(core: Core, step_time: StepTime, steps: int) -> list[float]:
    """Durations of the next `steps` steps, if all of them decode the same sequences."""
    if isinstance(core, LockstepGroup):
        return step_time.group_decode_seconds([next_decode_step(rank) for rank in core.ranks], steps)
    decodes, kv, longest = next_decode_step(core)
    seconds = step_time.decode_seconds(decodes, kv, longest, steps)
    if core.model_slots is not None:
        adapters = step_time.adapter_seconds(core.decode_set.sequences)
        seconds = [step_seconds + adapters for step_seconds in seconds]
    return seconds


def next_decode_step(core: EngineCore) -> tuple[int, int, int]:
    """Decodes of the next decode step, the tokens that they attend to, and the largest number that one attends to."""
    decode_set = core.decode_set
    return decode_set.size, decode_set.kv_tokens + decode_set.size, decode_set.longest() + 1
