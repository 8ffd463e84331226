"""The scheduler of one engine, as a pure state machine.

A backend calls `submit`, `begin_step` and `end_step` at any time, and `abort` to cancel a request. The scheduler holds
no clock and does not know how long an answer will be: the backend says which answers have ended. Steps may overlap: an
asynchronous backend begins step i + 1 before it ends step i (vLLM's async scheduling), and decides with what is known
then.

A step is scheduled in vLLM V1's order. Running decodes come first; if blocks run out, sequences are preempted
(`schedulers.scheduling_policies`). Prompts under way continue next. Then, unless a sequence was preempted, waiting
requests are admitted within the token, sequence and block limits. One-shot requests (Prelude 3) wait in a queue of
their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from schedulers.admission import (
    admit_transferred,
    allocate_transferred,
    blocks_to_admit,
    complete_reserved,
    start_prefill,
)
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch, OneShotBatch
from schedulers.engine_config import EngineConfig
from schedulers.kv_tiers import Load
from schedulers.sequence import FINISHED, FINISHING, PREFILLING, WAITING, Sequence, uncached_prefix_key
from schedulers.step_scheduling import StepScheduling
from workloads.request import Request


class EngineCore(StepScheduling):
    """One engine's scheduler. Its attributes are those of `CoreState`, which it changes."""

    # -- called by the backend ---------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        now: float,
        *,
        max_tokens: int | None = None,
        remote_prefill: bool = False,
        hold_blocks: bool = False,
        never_shed: bool = False,
    ) -> Sequence:
        """Queue a request. Nothing else is decided until the next step.

        Args:
            max_tokens: output tokens after which to end it, in place of the request's own (1 on a prefill engine).
            remote_prefill: a prefill engine has computed its prompt's cache and its first token. It may have been
                reserved before.
            hold_blocks: keep its blocks when it has finished, until `release`.
            never_shed: it was accepted before, by an engine that has failed.

        Raises:
            ValueError: an id that is being served, or a request that does not fit even alone.
            RequestShed: admission control refuses it.
        """
        if remote_prefill and request.id in self.reserved:
            return complete_reserved(self, self.reserved.pop(request.id))
        if request.id in self.sequences:
            raise ValueError(f"request {request.id}: expected an id that is not being served, found one that is")
        one_shot = request.one_shot and self.config.one_shot is not None
        sequence = Sequence(request, self._num_submitted, one_shot)
        if max_tokens is not None:
            sequence.max_tokens = max_tokens
        self._check_fits(sequence)
        sequence.hold_blocks = hold_blocks
        if remote_prefill:
            sequence.num_output_tokens = 1
            self.waiting_for_remote_kv.append(sequence)
        else:
            if self.scheduling_policy.follows_service:
                self._note_outputs()
            queue = self.queues[-1 if one_shot else 0]
            if self.admission_control is not None:
                if not never_shed:
                    self.admission_control.check(sequence, getattr(queue, "ahead_of", None), now)
                self.admission_control.submitted(sequence)
            if self.config.scheduler_recv_interval > 1:
                self.arrived.append(sequence)
            else:
                queue.push(sequence)
        self._num_submitted += 1
        self.outstanding_tokens += request.prompt_tokens + sequence.max_tokens
        self.sequences[request.id] = sequence
        self._admission_blocked = False
        return sequence

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache, if no sequence holds a block. Returns whether it was emptied.

        `reset_running_requests`: preempt all running sequences before.
        """
        if reset_running_requests:
            for sequence in reversed(list(self.running)):
                self.preempt(sequence)
        return self.kv_cache.reset_prefix_cache()

    def reserve(self, request: Request, now: float) -> Sequence | None:
        """Allocate the blocks of a prompt whose cache begins to come while a prefill engine is computing it.

        When all of it has come, the request is submitted with `remote_prefill`. None, and nothing is done, if another
        request waits, or there is no slot or too few blocks: then the cache should come when the prompt is complete.

        Raises:
            ValueError: as `submit`.
        """
        if request.id in self.sequences:
            raise ValueError(f"request {request.id}: expected an id that is not being served, found one that is")
        sequence = Sequence(request, self._num_submitted, False)
        self._check_fits(sequence)
        slots = self.config.max_num_seqs - len(self.running) - len(self.reserved)
        if slots <= 0 or self._has_queued() or self.waiting_for_remote_kv:
            return None
        if blocks_to_admit(self, sequence) > self.kv_cache.num_free_blocks:
            return None
        allocate_transferred(self, sequence)
        self._num_submitted += 1
        self.outstanding_tokens += request.prompt_tokens + sequence.max_tokens
        self.sequences[request.id] = self.reserved[request.id] = sequence
        return sequence

    def begin_step(self, now: float) -> Batch | None:
        """Schedule the next step. None when there is nothing to run."""
        decode_set, slots = self.decode_set, self.model_slots
        if slots is not None:
            slots.begin_step(now)
        if self.arrived:
            self._receive()
        transferred = self._transferred = admit_transferred(self) if self.waiting_for_remote_kv else ()
        chunks: list[Chunk] = []
        paused = self._schedule_running(chunks)
        decodes = tuple(decode_set.sequences)
        if self.admission_control is not None:
            self.admission_control.scheduled(chunks, now)
        if not decodes and not chunks:
            self._pass_over(paused)
            return None
        self._num_ahead = decode_set.step_index - self._num_ended
        decode_set.advance(1)
        kv_tokens, longest = decode_set.kv_tokens, decode_set.longest()
        self._resume(paused)
        finishing = decode_set.pop_finishing()
        if finishing:
            for sequence in finishing:
                self._sync_blocks(sequence)
        kind = self._complete_prefills(chunks, decodes, finishing) if chunks else DecodeBatch
        batch = kind(chunks, decodes, kv_tokens, longest, transferred, finishing, decode_set.step_index)
        if paused:
            batch.paused = paused
        if slots is not None:
            batch.loads = slots.take_loads()
        return batch

    def _pass_over(self, paused: list[Sequence] | tuple[()]) -> None:
        """Note that there is nothing to run; decodes that paused are decodes again."""
        self._resume(paused)
        if self.capacity is not None and self._num_ended == self.decode_set.step_index:
            self.capacity.idle()

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        """Record that a step has run; steps end in the order in which they began. Returns the finished sequences.

        `stopped`: sequences whose answer ended with this step before `max_tokens`. Tokens of later steps that were
        begun meanwhile are discarded.
        """
        self._num_ended = batch.step_index
        if self._cache_when_computed and batch.chunks:
            for chunk in batch.chunks:
                self._cache_computed_chunk(chunk)
            self._admission_blocked = False  # a sequence that shares these blocks needs fewer of its own
        if batch.finishing or stopped:
            return self._finish_all(batch.finishing, stopped, batch.step_index)
        return []

    def abort(self, request_id: int, now: float) -> Sequence | None:
        """Cancel a request in any state. None when no unfinished request has this id."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)
            self._free(sequence)
        return sequence

    def end_idle_step(self, step_index: int) -> None:
        """Record that a step has run in which other ranks alone had sequences."""
        self._num_ended = step_index

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence that was submitted with `hold_blocks`."""
        if sequence in self.awaiting_transfer:
            del self.awaiting_transfer[sequence]
            self._free(sequence)
            self._admission_blocked = False

    def finish_load(self, load: Load) -> None:
        """Note that a prefix has been loaded from tiers: its sequence, if it was not aborted, is queued again."""
        tiers, sequence = self.kv_tiers, load.sequence
        assert tiers is not None, "nothing is loaded without tiers"
        tiers.finish(load)
        if sequence is not None:
            sequence.prefix_loaded = True
            self._queue_of(sequence).requeue(sequence)
        self._admission_blocked = False

    # -- runs of decode steps ----------------------------------------------------------------------------------------

    def allocate_ahead(self, steps: int) -> None:
        """Allocate the blocks of the next `steps` steady decode steps before `advance` does.

        Afterwards the KV cache shows what it would show if these steps had been begun one by one.
        """
        new_blocks = self.decode_set.num_new_blocks_within(steps) - self.blocks_allocated_ahead
        if new_blocks > 0:
            self.kv_cache.allocate_unassigned(new_blocks)
            self.blocks_allocated_ahead += new_blocks

    def advance(self, steps: int) -> None:
        """Begin and end `steps` steady decode steps at once."""
        new_blocks = self.decode_set.num_new_blocks_within(steps)
        if self.blocks_allocated_ahead:
            from_ahead = min(new_blocks, self.blocks_allocated_ahead)
            self.blocks_allocated_ahead -= from_ahead
            new_blocks -= from_ahead
        if new_blocks:
            self.kv_cache.allocate_unassigned(new_blocks)
        self.decode_set.advance(steps)
        self._num_ended += steps
        if self.capacity is not None:
            self.capacity.ran_decodes(steps)
            if self.full_batch is not None:
                self.full_batch.scheduled_decodes()

    def run_decode_step(self, stopped: Iterable[Sequence]) -> list[Sequence]:
        """Begin and end at once a decode step in which sequences finish. Returns them, as `end_step`.

        Only steady steps came before it, and there are blocks for it (`has_blocks_for_steps`).
        """
        self.advance(1)
        finishing = self.decode_set.pop_finishing()
        for sequence in finishing:
            self._sync_blocks(sequence)
        return self._finish_all(finishing, stopped, self.decode_set.step_index)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _complete_prefills(
        self, chunks: list[Chunk], decodes: tuple[Sequence, ...], finishing: list[Sequence]
    ) -> type[Batch]:
        """Complete the prompts whose last chunks these are, in the step just begun. Returns the step's kind."""
        self._prompts_step = self.decode_set.step_index
        for chunk in chunks:
            if chunk.last:
                self._complete_prefill(chunk.sequence, finishing)
        return OneShotBatch if not decodes and all(chunk.sequence.one_shot for chunk in chunks) else MixedBatch

    def _complete_prefill(self, sequence: Sequence, finishing: list[Sequence]) -> None:
        """Count the first output token of a prompt that the step just begun completes; it decodes or finishes next."""
        sequence.num_output_tokens += 1
        if sequence.num_output_tokens >= sequence.max_tokens:
            sequence.state = FINISHING
            sequence.left_step = self.decode_set.step_index
            finishing.append(sequence)
            if self.capacity is not None:
                self._admission_blocked = False  # nothing is reserved for it any more
        else:
            self.decode_set.add(sequence)
            if self._shares_growing and self.shares_answer(sequence):
                self._sharing[sequence] = None

    def _cache_computed_chunk(self, chunk: Chunk) -> None:
        """Put the blocks of a computed chunk into the prefix cache."""
        sequence = chunk.sequence
        if self.leads_prefixes:
            self.prefix_leaders.pop(uncached_prefix_key(sequence, chunk.context // self.kv_cache.node_tokens), None)
        if sequence.state not in (WAITING, FINISHED) and sequence not in self.preempted_finishing:
            self._cache_prompt_blocks(sequence, chunk.context + chunk.tokens)


class ScheduledRequest(NamedTuple):
    """A request in a step: its id, the tokens that it computes, and those that were in the cache before."""

    request_id: int
    num_tokens: int
    num_computed_tokens: int


class HostedScheduler(Protocol):
    """A scheduler that decides for `HostedCore`. Requests go by their ids."""

    def add(self, request: Request, max_tokens: int) -> None:
        """Queue a request."""
        ...

    def schedule(self) -> tuple[list[int], list[ScheduledRequest]]:
        """Begin a step: the requests preempted for it, and those that run, oldest admission first."""
        ...

    def end_step(self, stopped: set[int]) -> None:
        """End the oldest step that has begun. The answers of `stopped` end with it, before their limit."""
        ...

    def abort(self, request_id: int) -> None:
        """Drop a request."""
        ...

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in its prefix cache."""
        ...

    def num_free_blocks(self) -> int: ...
    def num_unfinished(self) -> int: ...


class HostedCore(EngineCore):
    """An engine's scheduler whose decisions are another program's.

    `host` decides which requests run with how many tokens, and has the KV blocks, so that sequences count none. They
    are kept in the states that follow: a backend sees steps, counters and load as it does with `EngineCore`.
    """

    def __init__(self, config: EngineConfig, host: HostedScheduler) -> None:
        super().__init__(config)
        self._host = host
        self._shares_growing = False

    def submit(
        self,
        request: Request,
        now: float,
        *,
        max_tokens: int | None = None,
        remote_prefill: bool = False,
        hold_blocks: bool = False,
        never_shed: bool = False,
    ) -> Sequence:
        """See `EngineCore.submit`. Caches cannot be transferred."""
        if remote_prefill or hold_blocks:
            raise ValueError(f"request {request.id}: expected no transfer of its cache, which a host keeps")
        sequence = super().submit(request, now, max_tokens=max_tokens, never_shed=never_shed)
        self._host.add(request, sequence.max_tokens)
        return sequence

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        stopped = list(stopped)
        self._host.end_step({sequence.request.id for sequence in stopped})
        finished = super().end_step(batch, stopped, now)
        self.check_integrity()
        return finished

    def abort(self, request_id: int, now: float) -> Sequence | None:
        if request_id in self.sequences:
            self._host.abort(request_id)
        return super().abort(request_id, now)

    def cached_prefix_tokens(self, request: Request) -> int:
        return self._host.cached_prefix_tokens(request)

    def steady_decode_steps(self) -> int:
        """0: the host decides every step."""
        return 0

    def check_integrity(self) -> None:
        """Check that the host has as many unfinished requests, and note its free blocks."""
        self.kv_cache.num_free_blocks = self._host.num_free_blocks()
        if self._host.num_unfinished() != len(self.sequences):
            raise AssertionError(
                f"the host has {self._host.num_unfinished()} unfinished requests, {len(self.sequences)} are here"
            )

    def _schedule_running(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """See `EngineCore._schedule_running`. The host schedules waiting sequences as well."""
        preempted, scheduled = self._host.schedule()
        for request_id in preempted:
            self.preempt(self.sequences[request_id])
        decodes: set[Sequence] = set()
        for request_id, num_tokens, num_computed_tokens in scheduled:
            sequence = self.sequences[request_id]
            if sequence.state == WAITING:
                self._queue_of(sequence).remove(sequence)
                start_prefill(self, sequence, num_computed_tokens)
                self.running[sequence] = None
            if sequence.state == PREFILLING:
                self.schedule_chunk(chunks, sequence, num_tokens)
            else:
                decodes.add(sequence)
        self.kv_cache.num_free_blocks = self._host.num_free_blocks()
        return self._pause([sequence for sequence in self.decode_set.sequences if sequence not in decodes])

    def _sync_blocks(self, sequence: Sequence) -> None:
        """See `CoreState._sync_blocks`. The host has the blocks."""
