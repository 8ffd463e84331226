"""The scheduler of one engine, as a pure state machine.

A backend calls `submit`, `begin_step` and `end_step` at any time, and `abort` to cancel a request. The scheduler holds
no clock and does not know how long an answer will be: the backend says which answers have ended. Steps may overlap: an
asynchronous backend begins step i + 1 before it ends step i (vLLM's async scheduling), and decides with what is known
then.

A step is scheduled in vLLM V1's order. Running decodes come first; if blocks run out, sequences are preempted
(`schedulers.scheduling_policies`). Prompts under way continue next. Then, unless a sequence was preempted, waiting
requests are admitted within the token, sequence and block limits. One-shot requests (Prelude 3) wait in a queue of
their own. `schedulers.step_orders` has the orders of other schedulers.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from schedulers.admission import admit_transferred, admit_waiting, allocate_transferred, blocks_to_admit
from schedulers.batches import Batch, Chunk, DecodeBatch
from schedulers.kv_tiers import Load
from schedulers.lifecycle import Lifecycle, RunningPass
from schedulers.sequence import DECODING, PLAIN, PREFILLING, Sequence, SubmitOptions
from schedulers.step_orders import schedule_prompts_first, schedule_sharing
from workloads.request import Request


class EngineCore(Lifecycle):
    """One engine's scheduler. Its attributes are those of `CoreState`, which it changes."""

    def submit(self, request: Request, now: float, options: SubmitOptions = PLAIN) -> Sequence:
        """Queue a request. Nothing else is decided until the next step.

        Raises:
            ValueError: an id that is being served, or a request that does not fit even alone.
            RequestShed: admission control refuses it.
        """
        if options.remote_prefill and request.id in self.reserved:
            sequence = self.reserved.pop(request.id)  # its cache has come: it waits for a slot behind earlier ones
            sequence.num_output_tokens = 1
            waiting = self.waiting_for_remote_kv
            waiting.insert(sum(1 for earlier in waiting if earlier.blocks.num_private), sequence)
            return sequence
        one_shot = request.one_shot and self.config.one_shot is not None
        sequence = self._new_sequence(request, one_shot, options.max_tokens)
        sequence.hold_blocks = options.hold_blocks
        if options.remote_prefill:
            sequence.num_output_tokens = 1
            self.waiting_for_remote_kv.append(sequence)
        else:
            if self.scheduling_policy.follows_service:
                self.note_outputs()
            queue = self.queues[-1 if one_shot else 0]
            if self.admission_control is not None:
                if not options.never_shed:
                    self.admission_control.check(sequence, getattr(queue, "ahead_of", None), now)
                self.admission_control.submitted(sequence)
            if self.config.scheduler_recv_interval > 1:
                self.arrived.append(sequence)
            else:
                queue.push(sequence)
        self._count_in(sequence)
        return sequence

    def _count_in(self, sequence: Sequence) -> None:
        self._num_submitted += 1
        self.outstanding_tokens += sequence.request.prompt_tokens + sequence.max_tokens
        self.sequences[sequence.request.id] = sequence
        self.admission_blocked = False

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache, if no sequence holds a block (`reset_running_requests`: preempt all before)."""
        if reset_running_requests:
            for sequence in reversed(list(self.running)):
                self.preempt(sequence)
        return self.kv_cache.reset_prefix_cache()

    def reserve(self, request: Request, now: float) -> Sequence | None:
        """Allocate the blocks of a prompt whose cache begins to come while a prefill engine is computing it.

        When all of it has come, the request is submitted with `remote_prefill`. None, and nothing is done, if another
        request waits, or there is no slot or too few blocks: then the cache should come when the prompt is complete.
        Raises ValueError as `submit`.
        """
        sequence = self._new_sequence(request, False)
        slots = self.config.max_num_seqs - len(self.running) - len(self.reserved)
        if slots <= 0 or self.has_queued() or self.waiting_for_remote_kv:
            return None
        if blocks_to_admit(self, sequence) > self.kv_cache.num_free_blocks:
            return None
        allocate_transferred(self, sequence)
        self._count_in(sequence)
        self.reserved[request.id] = sequence
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
            self._resume(paused)
            if self.capacity is not None and self.num_ended == decode_set.step_index:
                self.capacity.idle()
            return None
        batch = self._begin_batch(chunks, decodes, transferred, paused)
        if paused:
            batch.paused = paused
        if slots is not None:
            batch.loads = slots.take_loads()
        return batch

    def _begin_batch(
        self, chunks: list[Chunk], decodes: tuple[Sequence, ...], transferred: Many[Sequence], paused: Many[Sequence]
    ) -> Batch:
        """Begin the step that has been scheduled."""
        decode_set = self.decode_set
        self._num_ahead = decode_set.step_index - self.num_ended
        decode_set.advance(1)
        kv_tokens, longest = decode_set.kv_tokens, decode_set.longest()
        self._resume(paused)
        finishing = decode_set.pop_finishing()
        for sequence in finishing:
            self._sync_blocks(sequence)
        kind = self._complete_prefills(chunks, decodes, finishing) if chunks else DecodeBatch
        return kind(chunks, decodes, kv_tokens, longest, transferred, finishing, decode_set.step_index)

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        """Record that a step has run; steps end in the order in which they began. Returns the finished sequences.

        `stopped`: sequences whose answer ended with this step before `max_tokens`. Tokens of later steps that were
        begun meanwhile are discarded.
        """
        self.num_ended = batch.step_index
        if self._cache_when_computed and batch.chunks:
            for chunk in batch.chunks:
                self._cache_computed_chunk(chunk)
            self.admission_blocked = False  # a sequence that shares these blocks needs fewer of its own
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

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence that was submitted with `hold_blocks`."""
        if sequence in self.awaiting_transfer:
            del self.awaiting_transfer[sequence]
            self._free(sequence)
            self.admission_blocked = False

    def finish_load(self, load: Load) -> None:
        """Note that a prefix has been loaded from tiers: its sequence, if it was not aborted, is queued again."""
        tiers, sequence = self.kv_tiers, load.sequence
        assert tiers is not None, "nothing is loaded without tiers"
        tiers.finish(load)
        if sequence is not None:
            sequence.prefix_loaded = True
            self._queue_of(sequence).requeue(sequence)
        self.admission_blocked = False

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
        self.num_ended += steps
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

    def _only_decodes(self) -> bool:
        """Tell whether the step gives every decode its token and does nothing else."""
        if self.prefilling or self._sharing or self._limits_prompts:
            return False
        if not self.admission_blocked and self.has_queued():
            return False
        return self.decode_set.num_new_blocks() <= self.kv_cache.num_free_blocks

    def _schedule_running(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """Schedule running sequences, then waiting ones unless one was preempted. Returns the decodes that pause."""
        if self._only_decodes():
            self.kv_cache.allocate_unassigned(self.decode_set.num_new_blocks())
            if self.capacity is not None:
                self.note_decodes(True)
            return ()
        if self.holds_prompts:
            self.schedule_decodes()
            return ()
        if self.prompts_first:
            return schedule_prompts_first(self, chunks)
        if self.shares_tokens:
            schedule_sharing(self, chunks)
            return ()
        if self._limits_prompts:
            self.limit_prompts()
        was_prefilling, preemptions = len(self.prefilling) > 0, self.preemptions
        paused, budget = self._schedule_admitted(chunks)
        if self.preemptions == preemptions and self.has_queued() and (was_prefilling or not self.admission_blocked):
            admit_waiting(self, chunks, budget)
        if self.capacity is not None and not chunks:
            self.note_decodes(self.preemptions == preemptions)
        if self.prefill_interval is not None:
            left_waiting = self.has_queued() if self.preemptions == preemptions else None
            runs = len(chunks) > 0 or self.decode_set.size > 0
            self.prefill_interval.end_step(runs, left_waiting)
        return paused

    def _schedule_admitted(self, chunks: list[Chunk]) -> tuple[list[Sequence] | tuple[()], int]:
        """Schedule decodes and prompts under way. Returns the decodes that pause, and the prompt tokens left."""
        decode_set = self.decode_set
        new_blocks, prompt_budget = decode_set.num_new_blocks(), self.prompt_budget(decode_set.size)
        budget = min(self.max_step_tokens - decode_set.size, prompt_budget)
        planned = self._plan_chunks(budget, self.kv_cache.num_free_blocks - new_blocks)
        if planned is not None:
            return (), budget - self._schedule_planned(chunks, planned, new_blocks)
        running_pass = RunningPass(self, chunks, prompt_budget)
        paused = self.pause(running_pass.run())
        return paused, min(running_pass.budget, running_pass.prompt_budget)

    def _schedule_planned(
        self, chunks: list[Chunk], planned: list[tuple[Sequence, int, int]] | tuple[()], decode_blocks: int
    ) -> int:
        """Give decodes their `decode_blocks` blocks and prompts the chunks `planned`. Returns the prompt tokens."""
        if decode_blocks:
            self.kv_cache.allocate_unassigned(decode_blocks)
        if self._sharing and (planned or self.has_queued()) and self._cache_growing_answers(1):
            self.admission_blocked = False
        total = 0
        for sequence, num_tokens, new_blocks in planned:
            if new_blocks > 0:
                self.kv_cache.allocate(sequence.blocks, new_blocks)
            total += self.schedule_chunk(chunks, sequence, num_tokens)
        return total

    def _resume(self, paused: Many[Sequence]) -> None:
        for sequence in paused:
            self.decode_set.add(sequence)

    def _plan_chunks(self, budget: int, free_blocks: int) -> list[tuple[Sequence, int, int]] | tuple[()] | None:
        """The next chunk of each prompt under way, with its tokens and new blocks, within `budget` tokens.

        None if blocks are short, or if tokens are and prompts compete for them with the decodes behind them.
        """
        if free_blocks < 0:
            return None
        if not self.prefilling or (self.prefill_interval is not None and self.prefill_interval.holds):
            return ()
        planned: list[tuple[Sequence, int, int]] = []
        competes = self._decode_is_behind_prompt()
        for sequence in self.prefilling:
            if budget <= 0:
                return None if competes else planned
            num_tokens = self.num_chunk_tokens(sequence, budget)
            if competes and num_tokens == budget:
                return None
            new_blocks = self.num_missing_blocks(sequence, sequence.num_computed_tokens + num_tokens)
            if new_blocks > 0:
                free_blocks -= new_blocks
                if free_blocks < 0:
                    return None
            if num_tokens:
                budget -= num_tokens
                planned.append((sequence, num_tokens, new_blocks))
        return planned

    def _decode_is_behind_prompt(self) -> bool:
        """Tell whether a decode may stand behind a prompt under way, which then gets its tokens first."""
        num_prompts = sum(1 for sequence in self.prefilling if not sequence.one_shot)
        for sequence in reversed(self.running):
            if sequence.state == DECODING or not num_prompts:
                return num_prompts > 0
            num_prompts -= sequence.state == PREFILLING
        return False
