"""How sequences get prompt tokens and leave an engine's running set: preempted, finished or aborted.

A block is *hashed*, in vLLM's word, when the tokens that fill it are computed and known, so that a prompt can find it.
Freed blocks are evicted in the order in which they were freed if they are hashed, and before all others if not.

Where blocks or tokens do not suffice for all, running sequences are scheduled one by one, in vLLM's order. Each in
turn, oldest admission first, gets its next tokens and their blocks. Where blocks are short, the sequence that the
preemption policy puts last is preempted, until there are enough or the sequence has preempted itself. As in vLLM this
may be one that has just been scheduled, or one whose last token is still being computed by a step in flight. Decodes
for which no tokens remain pause for the step.
"""

from __future__ import annotations

from collections.abc import Iterable

from schedulers.batches import Batch, Chunk, MixedBatch, OneShotBatch
from schedulers.core_state import CoreState
from schedulers.prefill_policies import UNLIMITED_TOKENS
from schedulers.sequence import DECODING, FINISHED, FINISHING, PREFILLING, WAITING, Sequence, uncached_prefix_key


class Lifecycle(CoreState):
    """The part of `EngineCore` that schedules chunks, and takes sequences out of their queues and sets."""

    def num_chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the next chunk of a prompt under way, at most `budget`."""
        if self.prefill_interval is not None and self.prefill_interval.holds:
            return 0
        remaining = sequence.num_tokens_to_compute - sequence.num_computed_tokens
        num_tokens = min(remaining, budget, self.prompt_limit)
        if self.chunk_unit > 1:
            num_tokens = whole_units(remaining, min(budget, self.prompt_limit), self.chunk_unit)
        if sequence.one_shot and self.config.one_shot:
            num_tokens = min(num_tokens, self.config.one_shot.max_step_tokens())
        return num_tokens

    def schedule_chunk(self, chunks: list[Chunk], sequence: Sequence, num_tokens: int) -> int:
        """Append a chunk of `num_tokens` prompt tokens, whose blocks are allocated. Returns `num_tokens`."""
        context = sequence.num_computed_tokens
        last = context + num_tokens == sequence.num_tokens_to_compute
        chunks.append(Chunk(sequence, num_tokens, context, last))
        sequence.num_computed_tokens += num_tokens
        if self.prefill_interval is not None and (
            context < sequence.num_tokens_to_compute - 1 or sequence in self.prefilling
        ):
            self.prefill_interval.prefills = True
        if last:
            self.prefilling.pop(sequence, None)
        else:
            self.prefilling[sequence] = None
        if self.leads_prefixes:
            self.lead(sequence, context)
        if not self._cache_when_computed and sequence.request.prefix_blocks:
            self.kv_cache.cache_blocks(sequence.blocks, sequence.request.prefix_blocks, sequence.num_computed_tokens)
        if self.scheduling_policy.follows_service:
            self.scheduling_policy.on_scheduled(sequence, num_tokens)
        self.prefill_tokens += num_tokens
        return num_tokens

    def lead(self, sequence: Sequence, context: int) -> None:
        """Note the first prefix id that a sequence is going to compute, after `context` tokens."""
        self.prefix_leaders[uncached_prefix_key(sequence, context // self.kv_cache.node_tokens)] = None

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
                self.admission_blocked = False  # nothing is reserved for it any more
        else:
            self.decode_set.add(sequence)
            if self._shares_growing and self.shares_answer(sequence):
                self._sharing[sequence] = None

    def _cache_computed_chunk(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if self.leads_prefixes:
            self.prefix_leaders.pop(uncached_prefix_key(sequence, chunk.context // self.kv_cache.node_tokens), None)
        if sequence.state not in (WAITING, FINISHED) and sequence not in self.preempted_finishing:
            self.kv_cache.cache_blocks(sequence.blocks, sequence.request.prefix_blocks, chunk.context + chunk.tokens)

    def note_outputs(self) -> None:
        """Tell the policy how many output tokens each decode has."""
        for sequence in self.decode_set.sequences:
            self.scheduling_policy.on_output(sequence, self.decode_set.num_output_tokens(sequence))

    def limit_prompts(self) -> None:
        """Set the most prompt tokens of a sequence in this step, and whether it has any."""
        threshold, rules = self.config.long_prefill_token_threshold, self.rules
        if threshold:  # the only request has nobody to make room for
            alone = len(self.sequences) < 2 and rules.lone_prompt_ignores_threshold
            self.prompt_limit = UNLIMITED_TOKENS if alone else threshold
        if self.prefill_interval is not None:
            self.prefill_interval.begin_step(len(self.running) > len(self.prefilling))

    def prompt_budget(self, num_decodes: int) -> int:
        """Prompt tokens that settings and policy allow beside these decodes, each of which attends to its new token."""
        policy, decode_set = self.chunk_policy, self.decode_set
        if policy is None:
            return self.max_step_tokens
        longest = decode_set.longest() + 1 if num_decodes else 0
        context = next((sequence.num_computed_tokens for sequence in self.prefilling), 0)
        limit = policy.max_prefill_tokens(num_decodes, decode_set.kv_tokens + num_decodes, longest, context)
        return min(self.max_step_tokens, limit)

    def pause(self, paused: list[Sequence]) -> list[Sequence]:
        """Take decodes that pause out of the set for this step. Returns them."""
        for sequence in paused:
            self.decode_set.remove(sequence)
            self._sync_blocks(sequence)
        if self._sharing and self._cache_growing_answers(1):
            self.admission_blocked = False
        return paused

    def schedule_decodes(self) -> None:
        """Give every decode the block that its next token starts; if blocks run out, preempt sequences."""
        preemptions, new_blocks = self.preemptions, self.decode_set.num_new_blocks()
        if new_blocks <= self.kv_cache.num_free_blocks:
            self.kv_cache.allocate_unassigned(new_blocks)
        else:
            running_pass = RunningPass(self, [], 0)
            running_pass.budget = UNLIMITED_TOKENS
            running_pass.run()
        if self._sharing and self.has_queued() and self._cache_growing_answers(1):
            self.admission_blocked = False
        if self.capacity is not None:
            self.note_decodes(self.preemptions == preemptions)

    def note_decodes(self, all_fit: bool) -> None:
        """Note a step of decodes without prompts, and whether all of them had their blocks."""
        assert self.capacity is not None, "nothing else counts them"
        if not all_fit:
            self.capacity.preempted(self.decode_set)
        elif self.decode_set.size:  # after the last answer there is no step of decodes, only room
            self.capacity.ran_decodes(1)
        if self.full_batch is not None:
            self.full_batch.scheduled_decodes()

    def preempt(self, sequence: Sequence, num_scheduled: int = 0, new_blocks: int = 0) -> None:
        """Free a sequence's blocks and queue it; it will compute its prompt and its generated tokens again.

        `num_scheduled`, `new_blocks`: the token and the block that a decode was given in the step being scheduled. A
        sequence whose last token is being computed is not queued, since it ends when the step in flight does.
        """
        if self._sharing:
            self._cache_growing_answers(0)
        if sequence.state == DECODING:
            sequence.preempted_step = self.decode_set.step_index
        num_in_flight = self.num_in_flight_outputs(sequence, num_scheduled)
        self._remove(sequence)
        sequence.blocks.num_private += new_blocks
        kv_cache, blocks = self.kv_cache, sequence.blocks
        num_hashed = self._num_hashed_tokens(sequence, num_scheduled - num_in_flight)
        if sequence in self._transferred:  # admitted by this very step: nothing has been written to its blocks yet
            num_hashed = 0
        if self._shares_growing:
            self._cache_answer_blocks(sequence, num_hashed)
        keeps = self.rules.keeps_preempted_blocks
        kv_cache.free(blocks, kv_cache.num_full_private(blocks, num_hashed) if keeps else 0, preempted=keeps)
        self.admission_blocked = False
        sequence.blocks_reserved = sequence.prefix_loaded = False
        sequence.preemptions += 1
        self.preemptions += 1
        if sequence.state == FINISHING:
            self.preempted_finishing[sequence] = None
            return
        sequence.state = WAITING
        sequence.num_tokens_to_compute = sequence.request.prompt_tokens + sequence.num_output_tokens
        sequence.num_computed_tokens = 0
        self._requeue(sequence)

    def num_in_flight_outputs(self, sequence: Sequence, num_scheduled: int = 0) -> int:
        """Computed tokens of a decode, or of one that finishes, that were not known when its blocks were hashed last.

        `num_scheduled`: 1 if the step being scheduled has a token of it, in which case it is hashed now.
        """
        latest = self.decode_set.step_index if sequence.state == DECODING else sequence.left_step
        in_flight = max(latest - self.num_ended, 0)
        return in_flight if num_scheduled else min(in_flight, self._num_ahead)

    def _num_hashed_tokens(self, sequence: Sequence, num_unknown: int) -> int:
        """Tokens of a sequence that vLLM has named, so that a prompt can find them: computed ones that are known.

        `num_unknown`: to add to the computed tokens of a decode, negative for tokens in flight.
        """
        computed = sequence.num_computed_tokens
        if sequence.state == PREFILLING:
            return computed
        return max(computed + num_unknown, min(computed, sequence.num_tokens_to_compute))

    def _finish_all(self, finishing: Iterable[Sequence], stopped: Iterable[Sequence], step: int) -> list[Sequence]:
        """Finish the sequences that reached `max_tokens` in step number `step`, then those that stopped with it.

        Their blocks are freed in the order of their admission, as vLLM does: those freed first are evicted first.
        """
        if self._sharing:
            self._cache_growing_answers(0)
        finished: list[Sequence] = []
        for sequence in finishing:
            if sequence.state == FINISHING:
                self._finish(sequence)
                finished.append(sequence)
        for sequence in stopped:
            if sequence.state != FINISHED:
                self._finish(sequence, step)
                finished.append(sequence)
        if len(finished) > 1 and self.kv_cache.enable_caching:
            for sequence in sorted(finished, key=lambda sequence: sequence.admission_index):
                self._free_finished(sequence)
        else:
            for sequence in finished:
                self._free_finished(sequence)
        return finished

    def _finish(self, sequence: Sequence, last_step: int | None = None) -> None:
        """Take a sequence out for good, but for its blocks.

        `last_step`: the step that computed its last token, if later ones had begun; their tokens are discarded.
        """
        was_decoding = sequence.state in (DECODING, FINISHING)
        num_in_flight = self.num_in_flight_outputs(sequence) if was_decoding else 0
        joined_step = sequence.joined_step  # it has no token of a step in which it paused
        self._remove(sequence)
        if last_step is not None:
            sequence.num_output_tokens -= max(sequence.left_step - max(last_step, joined_step), 0)
            num_in_flight = 0
        if was_decoding:  # the last token was never an input, so that its cache is not computed
            known = self._num_hashed_tokens(sequence, -num_in_flight)
            sequence.num_computed_tokens = min(known, sequence.request.prompt_tokens + sequence.num_output_tokens - 1)
            self._cache_answer_blocks(sequence, sequence.num_computed_tokens)
        sequence.state = FINISHED
        self.outstanding_tokens -= sequence.request.prompt_tokens + sequence.max_tokens
        del self.sequences[sequence.request.id]
        self.admission_blocked = False

    def _free_finished(self, sequence: Sequence) -> None:
        if sequence.hold_blocks:
            self.awaiting_transfer[sequence] = None
        else:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence; the tokens that fill them are those that it has computed."""
        kv_cache, blocks = self.kv_cache, sequence.blocks
        kv_cache.free(blocks, kv_cache.num_full_private(blocks, sequence.num_computed_tokens))

    def _requeue(self, sequence: Sequence) -> None:
        if self.rules.requeues_behind:
            self._queue_behind(sequence)
        else:
            self._queue_of(sequence).requeue(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue or set, and write its counts and blocks back into it."""
        if sequence.state == WAITING:
            self._remove_waiting(sequence)
        elif sequence.state == DECODING:
            self.decode_set.remove(sequence)
            self._sync_blocks(sequence)
        elif sequence.state == PREFILLING:
            self._remove_prefilling(sequence)
        if self._sharing:
            self._sharing.pop(sequence, None)
        if self.scheduling_policy.follows_service:
            self.scheduling_policy.on_output(sequence, sequence.num_output_tokens)
        if sequence in self.running:
            del self.running[sequence]
            if self.full_batch is not None:
                self.full_batch.left(self.num_ended == self.decode_set.step_index)
            if self.model_slots is not None:
                self.model_slots.leave(sequence)
        elif sequence in self.preempted_finishing:
            del self.preempted_finishing[sequence]
        else:
            self.one_shot_running.pop(sequence, None)

    def _remove_prefilling(self, sequence: Sequence) -> None:
        self.prefilling.pop(sequence, None)
        if self.shares_tokens:  # it may have led others without any tokens yet
            context = sequence.num_computed_tokens // self.kv_cache.node_tokens
            self.prefix_leaders.pop(uncached_prefix_key(sequence, context), None)

    def _remove_waiting(self, sequence: Sequence) -> None:
        if self.admission_control is not None:
            self.admission_control.left(sequence)
        if self.kv_tiers is not None and self.kv_tiers.forget(sequence):
            return  # its prefix is being loaded: it is in no queue
        if self.reserved.pop(sequence.request.id, None) is not None:
            return  # its cache is on its way
        if sequence in self.waiting_for_remote_kv:
            self.waiting_for_remote_kv.remove(sequence)
        elif sequence in self.arrived:
            self.arrived.remove(sequence)
        else:
            self._queue_of(sequence).remove(sequence)


def in_units(num_tokens: int, unit: int) -> int:
    """The tokens that a chunk counts as: whole units."""
    return num_tokens if unit == 1 else -(-num_tokens // unit) * unit


def whole_units(remaining: int, num_tokens: int, unit: int) -> int:
    """The tokens of a chunk of at most `num_tokens`: whole units, or all that remains if its units are as few."""
    return remaining if in_units(remaining, unit) <= num_tokens else num_tokens // unit * unit


class RunningPass:
    """One pass over the running sequences of a scheduler.

    `budget`: tokens of the step that are left, of which prompts may have `prompt_budget`. `decodes`: those that get a
    token, and the blocks for it that they do not count yet. `drafts`: tokens that they verify besides.
    """

    def __init__(
        self, core: Lifecycle, chunks: list[Chunk], prompt_budget: int, drafts: dict[Sequence, int] | None = None
    ) -> None:
        self._core = core
        self.budget, self.prompt_budget = core.max_step_tokens, prompt_budget
        self.chunks = chunks
        self.decodes: dict[Sequence, int] = {}
        self.drafts = {} if drafts is None else drafts
        self._order = list(core.running)
        self._index = 0

    def run(self) -> list[Sequence]:
        """Schedule what fits. Returns the decodes that pause."""
        core, order = self._core, self._order
        while self._index < len(order) and self.budget > 0:
            sequence = order[self._index]
            if self._schedule(sequence):
                self._index += 1
            elif not core.rules.goes_on_behind_preempted:
                break
        for sequence in tuple(core.one_shot_running):
            if sequence.state == PREFILLING and self.budget > 0:
                self._schedule(sequence)
        return [sequence for sequence in core.decode_set.sequences if sequence not in self.decodes]

    def _schedule(self, sequence: Sequence) -> bool:
        """Schedule the next tokens of a sequence, if it has any. False if it preempted itself."""
        core = self._core
        decodes = sequence.state == DECODING and sequence in core.decode_set.sequences
        if decodes:
            num_tokens, new_blocks = 1, core.num_blocks_to_decode(sequence)
        elif sequence.state == PREFILLING:
            num_tokens = core.num_chunk_tokens(sequence, min(self.budget, self.prompt_budget))
            new_blocks = core.num_missing_blocks(sequence, sequence.num_computed_tokens + num_tokens)
        else:
            return True  # its last token is being computed
        if not num_tokens:
            return True
        while new_blocks > core.kv_cache.num_free_blocks:
            victim = core.by_importance(self._order)[-1] if sequence in core.running else sequence
            self._preempt(victim)
            if victim is sequence:
                return False
        self.budget -= num_tokens
        if decodes:
            self.decodes[sequence] = core.allocate_to_decode(sequence, new_blocks)
            if sequence in self.drafts:
                self.drafts[sequence] = min(self.drafts[sequence], self.budget)
                self.budget -= self.drafts[sequence]
        else:
            core.kv_cache.allocate(sequence.blocks, max(new_blocks, 0))
            self.prompt_budget -= core.schedule_chunk(self.chunks, sequence, num_tokens)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence. What it was given in this step is free again."""
        core = self._core
        if sequence in self.decodes:
            self.budget += 1 + self.drafts.pop(sequence, 0)
            core.preempt(sequence, 1, self.decodes.pop(sequence))
            was_scheduled = True
        else:
            was_scheduled = self._withdraw_chunk(sequence)
            core.preempt(sequence)
        if sequence not in self._order:
            return
        position = self._order.index(sequence)
        del self._order[position]
        if position < self._index and (was_scheduled or core.rules.steps_back_for_idle):
            self._index -= 1

    def _withdraw_chunk(self, sequence: Sequence) -> bool:
        """Take the chunk of a sequence out of the step; False if there is none."""
        for i, chunk in enumerate(self.chunks):
            if chunk.sequence is sequence:
                self.budget += chunk.tokens
                self.prompt_budget += chunk.tokens
                self._core.prefill_tokens -= chunk.tokens
                del self.chunks[i]
                return True
        return False
