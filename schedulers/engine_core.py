"""The scheduler of one engine, as a pure state machine.

A backend calls `submit`, `begin_step` and `end_step` at any time, and `abort` to cancel a request. The scheduler holds
no clock and does not know how long an answer will be: the backend says which answers have ended. Steps may overlap: an
asynchronous backend begins step i + 1 before it ends step i (vLLM's async scheduling), and decides with what is known
then.

A step is scheduled in vLLM V1's order. Running decodes come first; if blocks run out, sequences are preempted
(`schedulers.preemption`). Prompts under way continue next. Then, unless a sequence was preempted, waiting requests are
admitted within the token, sequence and block limits. One-shot requests (Prelude 3) wait in a queue of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from schedulers.admission import admit, uncached_prefix_key
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch, OneShotBatch
from schedulers.kv_tiers import Load
from schedulers.lifecycle import Lifecycle
from schedulers.prefill_interval import UNLIMITED_TOKENS
from schedulers.remote_prefills import admit_transferred, allocate_transferred, blocks_to_admit, complete_reserved
from schedulers.running_pass import RunningPass
from schedulers.sequence import FINISHED, FINISHING, WAITING, Sequence

if TYPE_CHECKING:
    from schedulers.chunking import ChunkPolicy
    from workloads.request import Request


class EngineCore(Lifecycle):
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
        one_shot = self.config.one_shot is not None and request.one_shot
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
        transferred = self._transferred = admit_transferred(self) if self.waiting_for_remote_kv else ()
        chunks: list[Chunk] = []
        paused = self._schedule_running(chunks)
        decodes = tuple(decode_set.sequences)
        if self.admission_control is not None:
            self.admission_control.scheduled(chunks, now)
        if not decodes and not chunks:
            self._resume(paused)
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

    def _only_decodes(self) -> bool:
        """Tell whether the step gives every decode its token and does nothing else."""
        if self._prefilling or self._sharing or self._limits_prompts:
            return False
        if not self._admission_blocked and self._has_queued():
            return False
        return self.decode_set.num_new_blocks() <= self.kv_cache.num_free_blocks

    def _schedule_running(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """Schedule running sequences, then waiting ones unless one was preempted. Returns the decodes that pause.

        Decodes are counted, not walked, where blocks and tokens suffice for all running sequences.
        """
        if self._only_decodes():
            self.kv_cache.allocate_unassigned(self.decode_set.num_new_blocks())
            return ()
        if self._limits_prompts:
            self._limit_prompts()
        was_prefilling, preemptions = len(self._prefilling) > 0, self.preemptions
        paused, budget = self._schedule_admitted(chunks)
        if self.preemptions == preemptions and self._has_queued() and (was_prefilling or not self._admission_blocked):
            self._admit_waiting(chunks, budget)
        if self.prefill_interval is not None:
            admitted = any(chunk.context < chunk.sequence.num_tokens_to_compute - 1 for chunk in chunks)
            left_waiting = self._has_queued() if self.preemptions == preemptions else None
            runs = len(chunks) > 0 or self.decode_set.size > 0
            self.prefill_interval.end_step(len(chunks) > 0 and (was_prefilling or admitted), runs, left_waiting)
        return paused

    def _schedule_admitted(self, chunks: list[Chunk]) -> tuple[list[Sequence] | tuple[()], int]:
        """Schedule decodes and prompts under way. Returns the decodes that pause, and the prompt tokens left."""
        decode_set, prompt_budget = self.decode_set, self.config.max_num_batched_tokens
        new_blocks, budget = decode_set.num_new_blocks(), prompt_budget - decode_set.size
        if self.chunk_policy is not None:
            prompt_budget = self._chunk_limit(self.chunk_policy, decode_set.size)
            budget = min(budget, prompt_budget)
        planned = self._plan_chunks(budget, self.kv_cache.num_free_blocks - new_blocks)
        if planned is not None:
            return (), budget - self._schedule_planned(chunks, planned, new_blocks)
        running_pass = RunningPass(self, chunks, prompt_budget)
        paused = self._pause(running_pass.run())
        return paused, running_pass.num_tokens_left()

    def _limit_prompts(self) -> None:
        """Set the most prompt tokens of a sequence in this step, and whether it has any."""
        threshold, rules = self.config.long_prefill_token_threshold, self.config.rules
        if threshold:  # the only request has nobody to make room for
            alone = len(self.sequences) < 2 and rules.lone_prompt_ignores_threshold
            self.prompt_limit = UNLIMITED_TOKENS if alone else threshold
        if self.prefill_interval is not None:
            self.prefill_interval.begin_step(len(self.running) > len(self._prefilling))

    def _schedule_planned(
        self, chunks: list[Chunk], planned: list[tuple[Sequence, int, int]] | tuple[()], decode_blocks: int
    ) -> int:
        """Give decodes their `decode_blocks` blocks and prompts the chunks `planned`. Returns the prompt tokens."""
        if decode_blocks:
            self.kv_cache.allocate_unassigned(decode_blocks)
        if self._sharing and (planned or self._has_queued()) and self._cache_growing_answers(1):
            self._admission_blocked = False
        total = 0
        for sequence, num_tokens, new_blocks in planned:
            if new_blocks > 0:
                self.kv_cache.allocate(sequence.blocks, new_blocks)
            total += self.schedule_chunk(chunks, sequence, num_tokens)
        return total

    def _pause(self, paused: list[Sequence]) -> list[Sequence]:
        """Take decodes that pause out of the set for this step. Returns them."""
        for sequence in paused:
            self.decode_set.remove(sequence)
            self._sync_blocks(sequence)
        if self._sharing and self._cache_growing_answers(1):
            self._admission_blocked = False
        return paused

    def _resume(self, paused: list[Sequence] | tuple[()]) -> None:
        """Put decodes that pause back into the set."""
        for sequence in paused:
            self.decode_set.add(sequence)

    def _plan_chunks(self, budget: int, free_blocks: int) -> list[tuple[Sequence, int, int]] | tuple[()] | None:
        """The next chunk of each prompt under way, with its tokens and new blocks, within `budget` tokens.

        None if blocks are short, or if tokens are and prompts compete for them with the decodes behind them.
        """
        if free_blocks < 0:
            return None
        if not self._prefilling or (self.prefill_interval is not None and self.prefill_interval.holds):
            return ()
        planned: list[tuple[Sequence, int, int]] = []
        competes = self.config.long_prefill_token_threshold > 0
        for sequence in self._prefilling:
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
            budget -= num_tokens
            planned.append((sequence, num_tokens, new_blocks))
        return planned

    def num_chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the next chunk of a prompt under way, at most `budget`."""
        if self.prefill_interval is not None and self.prefill_interval.holds:
            return 0
        num_tokens = min(sequence.num_tokens_to_compute - sequence.num_computed_tokens, budget, self.prompt_limit)
        if sequence.one_shot and self.config.one_shot:
            num_tokens = min(num_tokens, self.config.one_shot.max_step_tokens())
        return num_tokens

    def _admit_waiting(self, chunks: list[Chunk], budget: int) -> None:
        """Admit waiting sequences to the step."""
        follows_service = self.scheduling_policy.follows_service
        if follows_service:
            self._note_outputs()
        # Another order may put a sequence first that needs fewer blocks, and none that needs no slot.
        lacks_space = admit(self, chunks, budget) and (not follows_service or self._all_lack_slots())
        # These prompts become decodes, beside which a policy may allow smaller chunks that need fewer blocks.
        self._admission_blocked = lacks_space and (self.chunk_policy is None or not chunks)

    def _chunk_limit(self, policy: ChunkPolicy, num_decodes: int) -> int:
        """Prompt tokens that the policy allows beside these decodes, each of which attends to its new token, too."""
        decode_set = self.decode_set
        decode_kv = decode_set.kv_tokens + num_decodes
        longest = decode_set.longest() + 1 if num_decodes else 0
        context = next((sequence.num_computed_tokens for sequence in self._prefilling), 0)
        return policy.max_prefill_tokens(num_decodes, decode_kv, longest, context)

    def _note_outputs(self) -> None:
        """Tell the policy how many output tokens each decode has."""
        for sequence in self.decode_set.sequences:
            self.scheduling_policy.on_output(sequence, self.decode_set.num_output_tokens(sequence))

    def schedule_chunk(self, chunks: list[Chunk], sequence: Sequence, num_tokens: int) -> int:
        """Append a chunk of `num_tokens` prompt tokens, whose blocks are allocated. Called by `schedulers.admission`.

        Returns `num_tokens`.
        """
        context = sequence.num_computed_tokens
        last = context + num_tokens == sequence.num_tokens_to_compute
        chunk = Chunk(sequence, num_tokens, context, last)
        chunks.append(chunk)
        sequence.num_computed_tokens += num_tokens
        if last:
            self._prefilling.pop(sequence, None)
        else:
            self._prefilling[sequence] = None
        if self.config.in_batch_prefix_caching:
            self.prefix_leaders[uncached_prefix_key(sequence, context // self.kv_cache.node_tokens)] = None
        if not self._cache_when_computed and sequence.request.prefix_blocks:
            self._cache_prompt_blocks(sequence, sequence.num_computed_tokens)
        if self.scheduling_policy.follows_service:
            self.scheduling_policy.on_scheduled(sequence, num_tokens)
        self.prefill_tokens += num_tokens
        return num_tokens

    def _complete_prefills(
        self, chunks: list[Chunk], decodes: tuple[Sequence, ...], finishing: list[Sequence]
    ) -> type[Batch]:
        """Complete the prompts whose last chunks these are, in the step just begun. Returns the step's kind."""
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
        else:
            self.decode_set.add(sequence)
            if self._shares_growing and self.shares_answer(sequence):
                self._sharing[sequence] = None

    def _cache_computed_chunk(self, chunk: Chunk) -> None:
        """Put the blocks of a computed chunk into the prefix cache."""
        sequence = chunk.sequence
        if self.config.in_batch_prefix_caching:
            self.prefix_leaders.pop(uncached_prefix_key(sequence, chunk.context // self.kv_cache.node_tokens), None)
        if sequence.state not in (WAITING, FINISHED) and sequence not in self.preempted_finishing:
            self._cache_prompt_blocks(sequence, chunk.context + chunk.tokens)
