"""Pipeline parallelism: as many batches are in flight as a model has stages.

A stage holds some of the layers. While one batch is at the second stage, the first can compute another. The scheduler
is therefore asked for a next batch before the one before it has ended, up to one for each stage, as in vLLM V1
(`EngineCore.step_with_batch_queue`). A sequence that decodes is in one batch at a time, since its next input is the
token of that batch. So sequences circulate in *micro-batches*: those whose tokens come together are scheduled together
again. A prompt joins the batch that computes its end. Chunks of one prompt may be in several batches in flight: they
pass every stage in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from schedulers.batches import Batch
from schedulers.chunking import ChunkPolicy
from schedulers.decode_set import DecodeSet
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import KVCache
from schedulers.sequence import DECODING, Sequence

MICRO_BATCH_STEPS: Final = 1 << 40
"""Steps are counted by micro-batch: those of micro-batch n from n times this number on, so that each has its own."""


def micro_batch_of(step_index: int) -> int:
    return step_index // MICRO_BATCH_STEPS


class PipelinedEngineCore(EngineCore):
    """An engine's scheduler with several batches in flight.

    The `step_index` of a batch, and the steps that a sequence remembers, are counted by micro-batch
    (`MICRO_BATCH_STEPS`).

    Args:
        num_stages: batches that may be in flight.
        config, chunk_policy, make_cache: as in `EngineCore`.

    Attributes:
        micro_batches: decodes by micro-batch; `decode_set` is the one scheduled last.
        in_flight: the batch of each that has begun and not ended, or None.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_stages: int,
        chunk_policy: ChunkPolicy | None = None,
        make_cache: type[KVCache] = KVCache,
    ) -> None:
        super().__init__(config, chunk_policy, make_cache)
        self.micro_batches = [self.decode_set]
        for number in range(1, num_stages):
            decodes = DecodeSet(config.block_size)
            decodes.step_index = number * MICRO_BATCH_STEPS
            self.micro_batches.append(decodes)
        self.in_flight: list[Batch | None] = [None] * num_stages
        self._num_begun = 0
        # Preempted sequences whose last batch is still in flight: they are queued when it has ended.
        self._returning: dict[Sequence, None] = {}

    # -- called by the backend ---------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> Batch | None:
        """See `EngineCore.begin_step`. None as well while a batch of every micro-batch is in flight."""
        number = self._next_micro_batch()
        if number < 0:
            return None
        self.decode_set = self.micro_batches[number]
        batch = super().begin_step(now)
        if batch is not None:
            self.in_flight[number] = batch
            self._num_begun += 1
        return batch

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        self.in_flight[micro_batch_of(batch.step_index)] = None
        finished = super().end_step(batch, stopped, now)
        if self._returning:
            for sequence in [candidate for candidate in self._returning if not self.is_in_flight(candidate)]:
                self._queue_again(sequence)
        return finished

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Tell whether a batch in flight computes tokens of a sequence."""
        return any(batch is not None and _computes(batch, sequence) for batch in self.in_flight)

    def awaits_token(self, sequence: Sequence) -> bool:
        """Tell whether a batch in flight computes an output token of a sequence, which counts from its beginning on."""
        for batch in self.in_flight:
            if batch is None:
                continue
            if sequence in batch.decodes or any(chunk.last and chunk.sequence is sequence for chunk in batch.chunks):
                return True
        return False

    # -- runs of decode steps ----------------------------------------------------------------------------------------

    def steady_decode_steps(self) -> int:
        """0: batches of other sequences run in between."""
        return 0

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def step_index(self) -> int:
        """See `EngineCore.step_index`: batches begun so far, of all micro-batches."""
        return self._num_begun

    @property
    def num_decodes(self) -> int:
        return sum(decodes.size for decodes in self.micro_batches)

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._returning)

    def check_integrity(self) -> None:
        """See `EngineCore.check_integrity`. A sequence decodes in one micro-batch, and in one batch in flight."""
        super().check_integrity()
        decoding: dict[Sequence, None] = {}
        for decodes in self.micro_batches:
            decodes.check_integrity()
            for sequence in decodes.sequences:
                if sequence in decoding:
                    raise AssertionError(f"{sequence} decodes in two micro-batches")
                decoding[sequence] = None
        flying: dict[Sequence, None] = {}
        for batch in self.in_flight:
            for sequence in () if batch is None else batch.decodes:
                if sequence in flying:
                    raise AssertionError(f"{sequence} decodes in two batches in flight")
                flying[sequence] = None

    # -- one step ----------------------------------------------------------------------------------------------------

    def _next_micro_batch(self) -> int:
        """The micro-batch to schedule: one that is not in flight, with decodes if there is one; -1: none."""
        idle = -1
        for number in range(len(self.in_flight)):
            if self.in_flight[number] is None:
                if self.micro_batches[number].size:
                    return number
                if idle < 0:
                    idle = number
        return idle

    def _remove(self, sequence: Sequence) -> None:
        if sequence in self._returning:
            self._queue_again(sequence)
        scheduled = self.decode_set
        if sequence.state == DECODING:
            self.decode_set = self.micro_batches[micro_batch_of(sequence.joined_step)]
        super()._remove(sequence)
        self.decode_set = scheduled

    def num_in_flight_outputs(self, sequence: Sequence, num_scheduled: int = 0) -> int:
        """0: a sequence is in one batch at a time, whose inputs are known when it is scheduled."""
        return 0

    def preempt(self, sequence: Sequence, num_scheduled: int = 0, new_blocks: int = 0) -> None:
        decoding = sequence.state == DECODING
        super().preempt(sequence, num_scheduled, new_blocks)
        if decoding:
            sequence.preempted_step = sequence.left_step

    def _requeue(self, sequence: Sequence) -> None:
        """See `EngineCore._requeue`. A sequence that a batch in flight computes is queued when that has ended."""
        if self.is_in_flight(sequence):
            self._returning[sequence] = None
        else:
            super()._requeue(sequence)

    def _queue_again(self, sequence: Sequence) -> None:
        """Queue a sequence whose last batch has ended."""
        del self._returning[sequence]
        super()._requeue(sequence)
        self._admission_blocked = False

    def _note_outputs(self) -> None:
        """See `EngineCore._note_outputs`, for the decodes of all micro-batches."""
        scheduled = self.decode_set
        for decodes in self.micro_batches:
            self.decode_set = decodes
            super()._note_outputs()
        self.decode_set = scheduled

    def _num_unassigned_blocks(self) -> int:
        scheduled, unassigned = self.decode_set, 0
        for decodes in self.micro_batches:
            self.decode_set = decodes
            unassigned += super()._num_unassigned_blocks()
        self.decode_set = scheduled
        return unassigned


def _computes(batch: Batch, sequence: Sequence) -> bool:
    return sequence in batch.decodes or any(chunk.sequence is sequence for chunk in batch.chunks)
