"""The steps at which answers end. The simulator knows the length of every answer; the scheduler does not."""

from __future__ import annotations

import sys
from heapq import heappop, heappush
from typing import Final

from schedulers.sequence import DECODING, WAITING, Sequence
from twin.serving.records.requests import RequestRecord

NEVER: Final = sys.maxsize
"""A step index that no step reaches."""


class AnswerEnds:
    """Decoding sequences of one engine whose answers end before `max_tokens`, ordered by the step that ends them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence, int]] = []  # step index, tie-breaker, sequence, its joined_step

    def expect(self, sequence: Sequence, step_index: int) -> None:
        """Add a sequence that decodes from the step after `step_index` on."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        answer = record.answer_tokens - record.delivered
        if answer < sequence.max_tokens and sequence.state == DECODING:
            last_step = step_index + answer - sequence.num_output_tokens
            heappush(self._heap, (last_step, sequence.seq_id, sequence, sequence.joined_step))

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
