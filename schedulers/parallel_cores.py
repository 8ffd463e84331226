"""Schedulers of several devices, which look to a backend like one `EngineCore`: ranks in lockstep, and pipeline stages.

Data-parallel ranks have their own requests and KV memory. A layer's experts lie on all ranks, so no rank can run a step
alone: an idle rank takes part with an empty batch.

A pipeline stage holds some of the layers. While one batch is at the second stage, the first can compute another. The
scheduler is therefore asked for a next batch before the one before it has ended, up to one for each stage, as in vLLM
V1 (`EngineCore.step_with_batch_queue`). A sequence that decodes is in one batch at a time, since its next input is the
token of that batch. So sequences circulate in *micro-batches*: those whose tokens come together are scheduled together
again. A prompt joins the batch that computes its end. Chunks of one prompt may be in several batches in flight: they
pass every stage in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import KVCache
from schedulers.prefill_policies import PromptBalance
from schedulers.sequence import DECODING, PLAIN, DecodeSet, Sequence, SubmitOptions
from schedulers.step_policies import ChunkPolicy
from workloads.request import Request


class GroupBatch(Batch):
    """One step of all ranks: the sums of their batches, and in `ranks` the batch of each, None for an idle rank."""

    __slots__ = ("ranks",)

    def __init__(self, ranks: list[Batch | None], step_index: int) -> None:
        batches = [batch for batch in ranks if batch is not None]
        super().__init__(
            [chunk for batch in batches for chunk in batch.chunks],
            [sequence for batch in batches for sequence in batch.decodes],
            sum(batch.decode_kv for batch in batches),
            max((batch.longest_decode for batch in batches), default=0),
            transferred=[sequence for batch in batches for sequence in batch.transferred],
            finishing=[sequence for batch in batches for sequence in batch.finishing],
            step_index=step_index,
        )
        self.ranks = ranks
        self.paused = [sequence for batch in batches for sequence in batch.paused]


class LockstepGroup:
    """Ranks in lockstep, with the part of `EngineCore`'s interface that a backend uses; numbers are those of all ranks.

    A request goes to the rank with the lowest 4 × waiting + running, as in vLLM's front end; ranks take turns among
    equals. `reserved`, `sequences`: of all ranks, by request id.
    """

    def __init__(self, make_core: Callable[[], EngineCore], ranks: int) -> None:
        self.ranks = [make_core() for _ in range(ranks)]
        self._rank_of: dict[int, EngineCore] = {}
        self._turn = 0
        config = self.ranks[0].config
        timeout, batching_wait = config.attention_dp_timeout_iters, config.attention_dp_batching_wait_iters
        self._balance = PromptBalance(timeout, batching_wait) if timeout else None

    def submit(self, request: Request, now: float, options: SubmitOptions = PLAIN) -> Sequence:
        is_reserved = options.remote_prefill and request.id in self.reserved
        rank = self._rank_of[request.id] if is_reserved else self._choose_rank()
        sequence = rank.submit(request, now, options)
        self._rank_of[request.id] = rank
        return sequence

    def reserve(self, request: Request, now: float) -> Sequence | None:
        rank = self._choose_rank()
        sequence = rank.reserve(request, now)
        if sequence is not None:
            self._rank_of[request.id] = rank
        return sequence

    def _choose_rank(self) -> EngineCore:
        start = self._turn
        self._turn = (start + 1) % len(self.ranks)
        return min(self.ranks[start:] + self.ranks[:start], key=lambda core: 4 * core.num_waiting + core.num_running)

    def begin_step(self, now: float) -> GroupBatch | None:
        """See `EngineCore.begin_step`, on every rank; idle ranks advance too."""
        if self._balance is not None:
            self._hold_prompts(self._balance)
        batches = [rank.begin_step(now) for rank in self.ranks]
        if not any(batch is not None for batch in batches):
            return None
        for rank, batch in zip(self.ranks, batches, strict=True):
            if batch is None:
                rank.decode_set.advance(1)
        return GroupBatch(batches, self.step_index)

    def _hold_prompts(self, balance: PromptBalance) -> None:
        """Have all ranks compute prompts in the next step, or none."""
        with_prompts = with_decodes = with_room = 0
        for rank in self.ranks:
            admits = rank.has_queued() and not rank.admission_blocked and len(rank.running) < rank.max_running
            with_prompts += admits or len(rank.prefilling) > 0
            with_decodes += rank.num_decodes > 0
            with_room += rank.num_decodes < rank.max_running
        holds = balance.holds(with_prompts, with_decodes, with_room, len(self.ranks))
        for rank in self.ranks:
            rank.holds_prompts = holds

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        assert isinstance(batch, GroupBatch)
        stopped_by_rank = self._group_by_rank(stopped)
        finished: list[Sequence] = []
        for rank, part in zip(self.ranks, batch.ranks, strict=True):
            if part is not None:
                finished.extend(rank.end_step(part, stopped_by_rank.get(id(rank), ()), now))
            else:
                rank.num_ended = batch.step_index
        self._forget(finished)
        return finished

    def abort(self, request_id: int, now: float) -> Sequence | None:
        rank = self._rank_of.pop(request_id, None)
        return rank.abort(request_id, now) if rank else None

    def release(self, sequence: Sequence) -> None:
        rank = self._rank_of.pop(sequence.request.id, None)
        if rank is not None:
            rank.release(sequence)

    def steady_decode_steps(self) -> int:
        """See `EngineCore.steady_decode_steps`: the fewest of all ranks that are not idle."""
        return min((rank.steady_decode_steps() for rank in self.ranks if rank.sequences), default=0)

    def num_new_blocks_by_step(self, steps: int) -> list[int]:
        return [sum(blocks) for blocks in zip(*(r.num_new_blocks_by_step(steps) for r in self.ranks), strict=True)]

    def has_blocks_for_steps(self, steps: int) -> bool:
        return all(rank.has_blocks_for_steps(steps) for rank in self.ranks)

    def allocate_ahead(self, steps: int) -> None:
        for rank in self.ranks:
            rank.allocate_ahead(steps)

    def advance(self, steps: int) -> None:
        for rank in self.ranks:
            rank.advance(steps)

    def run_decode_step(self, stopped: Iterable[Sequence]) -> list[Sequence]:
        stopped_by_rank = self._group_by_rank(stopped)
        by_rank = [rank.run_decode_step(stopped_by_rank.get(id(rank), ())) for rank in self.ranks]
        finished = [sequence for sequences in by_rank for sequence in sequences]
        self._forget(finished)
        return finished

    def current_decode_batch(self) -> Batch:
        batches = [rank.current_decode_batch() if rank.num_decodes else None for rank in self.ranks]
        return GroupBatch(batches, self.step_index)

    @property
    def step_index(self) -> int:
        return self.ranks[0].step_index

    @property
    def num_decodes(self) -> int:
        return sum(rank.num_decodes for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        return sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_running_seqs(self) -> int:
        return sum(rank.num_running_seqs for rank in self.ranks)

    @property
    def outstanding_tokens(self) -> int:
        return sum(rank.outstanding_tokens for rank in self.ranks)

    @property
    def sequences(self) -> dict[int, Sequence]:
        return {number: sequence for rank in self.ranks for number, sequence in rank.sequences.items()}

    @property
    def reserved(self) -> dict[int, Sequence]:
        return {number: sequence for rank in self.ranks for number, sequence in rank.reserved.items()}

    def cached_prefix_tokens(self, request: Request) -> int:
        """See `EngineCore.cached_prefix_tokens`, the most of all ranks."""
        return max(rank.cached_prefix_tokens(request) for rank in self.ranks)

    def _group_by_rank(self, sequences: Iterable[Sequence]) -> dict[int, list[Sequence]]:
        groups: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(id(self._rank_of[sequence.request.id]), []).append(sequence)
        return groups

    def _forget(self, finished: Iterable[Sequence]) -> None:
        for sequence in finished:
            if not sequence.hold_blocks:
                del self._rank_of[sequence.request.id]

    def check_integrity(self) -> None:
        """Check each rank, and that all have begun the same number of steps; AssertionError with the numbers."""
        for rank in self.ranks:
            rank.check_integrity()
        step_indices = [rank.step_index for rank in self.ranks]
        if len(set(step_indices)) > 1:
            raise AssertionError(f"ranks have begun {step_indices} steps")


Core: TypeAlias = EngineCore | LockstepGroup
"""The scheduler of an engine, or those of its data-parallel ranks."""

MICRO_BATCH_STEPS: Final = 1 << 40
"""Steps are counted by micro-batch: those of micro-batch n from n times this number on, so that each has its own."""


def micro_batch_of(step_index: int) -> int:
    return step_index // MICRO_BATCH_STEPS


class PipelinedEngineCore(EngineCore):
    """An engine's scheduler with up to `num_stages` batches in flight.

    The `step_index` of a batch, and the steps that a sequence remembers, are counted by micro-batch
    (`MICRO_BATCH_STEPS`). `micro_batches`: decodes by micro-batch; `decode_set` is the one scheduled last. `in_flight`:
    the batch of each that has begun and not ended, or None.
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
        return any(
            sequence in batch.decodes or any(chunk.sequence is sequence for chunk in batch.chunks)
            for batch in self.in_flight
            if batch is not None
        )

    def awaits_token(self, sequence: Sequence) -> bool:
        """Tell whether a batch in flight computes an output token of a sequence, which counts from its beginning on."""
        return any(batch is not None and batch.has_output(sequence) for batch in self.in_flight)

    def steady_decode_steps(self) -> int:
        return 0  # batches of other sequences run in between

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
        return 0  # a sequence is in one batch at a time, whose inputs are known when it is scheduled

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
        del self._returning[sequence]
        super()._requeue(sequence)
        self.admission_blocked = False

    def note_outputs(self) -> None:
        """See `EngineCore.note_outputs`, for the decodes of all micro-batches."""
        scheduled = self.decode_set
        for decodes in self.micro_batches:
            self.decode_set = decodes
            super().note_outputs()
        self.decode_set = scheduled

    def _num_unassigned_blocks(self) -> int:
        scheduled, unassigned = self.decode_set, 0
        for decodes in self.micro_batches:
            self.decode_set = decodes
            unassigned += super()._num_unassigned_blocks()
        self.decode_set = scheduled
        return unassigned
