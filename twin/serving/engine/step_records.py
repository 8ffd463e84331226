"""The steps at which answers end, and the records that steps leave: in the log, and of their requests.

The simulator knows the length of every answer; the scheduler does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from schedulers.batches import Batch, OneShotBatch
from schedulers.sequence import DECODING, WAITING, Sequence
from twin.serving.records.engine_log import DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP, EngineLog
from twin.serving.records.overload import Backlog
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
        """Remove and return the sequences whose answers end with step `step_index`.

        A sequence that was preempted while that very step ran is included: it has its last token.
        """
        sequences: list[Sequence] = []
        heap = self._heap
        while heap and heap[0][0] <= step_index:
            last_step, _, sequence, joined = heappop(heap)
            if sequence.joined_step == joined or (sequence.preempted_step == last_step and _has_whole_answer(sequence)):
                sequences.append(sequence)
        return sequences

    def clear(self) -> None:
        """Remove all sequences."""
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
