"""The records that an engine's steps leave: in its log, and of the requests that they start, advance and finish."""

from __future__ import annotations

from collections.abc import Callable

from schedulers.batches import Batch, OneShotBatch
from schedulers.sequence import DECODING, Sequence
from twin.serving.engine.answer_ends import AnswerEnds
from twin.serving.records.engine_log import DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP, EngineLog
from twin.serving.records.overload import Backlog
from twin.serving.records.requests import UNSET, RequestRecord

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

    def begin(self, batch: Batch, now: float) -> None:
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
            if chunk.last and sequence.state == DECODING and self.expects_ends:
                self.answer_ends.expect(sequence, batch.step_index)
            if self.on_chunk is not None and not chunk.last:
                self.on_chunk(sequence, -1)
        for sequence in batch.transferred:
            self.backlog.start(now)
            if self.expects_ends:
                self.answer_ends.expect(sequence, batch.step_index - 1)

    def end(self, batch: Batch, start: float, end: float) -> None:
        """Note a step that has run, and the tokens that it has computed."""
        log = self.log
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
        self.backlog.lose_all(now)

    def restart(self) -> None:
        """Begin with a new scheduler, which counts its steps from 0."""
        self.answer_ends.clear()
        self.lost_steps = self.log.num_steps
