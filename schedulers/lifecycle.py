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

from schedulers.batches import Chunk
from schedulers.core_state import CoreState
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
        """Append a chunk of `num_tokens` prompt tokens, whose blocks are allocated. Called by `schedulers.admission`.

        Returns `num_tokens`.
        """
        context = sequence.num_computed_tokens
        last = context + num_tokens == sequence.num_tokens_to_compute
        chunk = Chunk(sequence, num_tokens, context, last)
        chunks.append(chunk)
        sequence.num_computed_tokens += num_tokens
        if self.prefill_interval is not None and (
            context < sequence.num_tokens_to_compute - 1 or sequence in self._prefilling
        ):
            self.prefill_interval.prefills = True
        if last:
            self._prefilling.pop(sequence, None)
        else:
            self._prefilling[sequence] = None
        if self.leads_prefixes:
            self._lead(sequence, context)
        if not self._cache_when_computed and sequence.request.prefix_blocks:
            self._cache_prompt_blocks(sequence, sequence.num_computed_tokens)
        if self.scheduling_policy.follows_service:
            self.scheduling_policy.on_scheduled(sequence, num_tokens)
        self.prefill_tokens += num_tokens
        return num_tokens

    def start_sharing(self, sequence: Sequence) -> None:
        """Let an admitted sequence share the tokens of steps from now on. Called by `schedulers.admission`."""
        self._prefilling[sequence] = None
        if self.leads_prefixes:
            self._lead(sequence, sequence.num_computed_tokens)

    def _lead(self, sequence: Sequence, context: int) -> None:
        """Note the first prefix id that a sequence is going to compute, after `context` tokens."""
        self.prefix_leaders[uncached_prefix_key(sequence, context // self.kv_cache.node_tokens)] = None

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
        if self.config.rules.keeps_preempted_blocks:
            kv_cache.free(blocks, kv_cache.num_full_private(blocks, num_hashed), preempted=True)
        else:
            kv_cache.free(blocks)
        self._admission_blocked = False
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

    def preemption_victim(self, running: list[Sequence]) -> Sequence:
        """The running sequence that is preempted first; `running` is in the order of admission."""
        return self._by_importance(running)[-1]

    def num_in_flight_outputs(self, sequence: Sequence, num_scheduled: int = 0) -> int:
        """Computed tokens of a decode, or of one that finishes, that were not known when its blocks were hashed last.

        `num_scheduled`: 1 if the step being scheduled has a token of it, in which case it is hashed now.
        """
        latest = self.decode_set.step_index if sequence.state == DECODING else sequence.left_step
        in_flight = max(latest - self._num_ended, 0)
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
            for sequence in sorted(finished, key=admission_order):
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
        self._admission_blocked = False

    def _free_finished(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence unless they are to be transferred."""
        if sequence.hold_blocks:
            self.awaiting_transfer[sequence] = None
        else:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence; the tokens that fill them are those that it has computed."""
        kv_cache, blocks = self.kv_cache, sequence.blocks
        kv_cache.free(blocks, kv_cache.num_full_private(blocks, sequence.num_computed_tokens))

    def _requeue(self, sequence: Sequence) -> None:
        """Queue a preempted sequence again."""
        if self.config.rules.requeues_behind:
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
                self.full_batch.left(self._num_ended == self.decode_set.step_index)
            if self.model_slots is not None:
                self.model_slots.leave(sequence)
        elif sequence in self.preempted_finishing:
            del self.preempted_finishing[sequence]
        else:
            self.one_shot_running.pop(sequence, None)

    def _remove_prefilling(self, sequence: Sequence) -> None:
        """Take a sequence out of the prompts under way."""
        self._prefilling.pop(sequence, None)
        if self.shares_tokens:  # it may have led others without any tokens yet
            context = sequence.num_computed_tokens // self.kv_cache.node_tokens
            self.prefix_leaders.pop(uncached_prefix_key(sequence, context), None)

    def _remove_waiting(self, sequence: Sequence) -> None:
        """Take a sequence out of where it waits."""
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


def admission_order(sequence: Sequence) -> int:
    """Sorts sequences by their admission."""
    return sequence.admission_index


class RunningPass:
    """One pass over the running sequences of a scheduler.

    Attributes:
        budget: tokens of the step that are left. prompt_budget: of them, those that prompts may have.
        chunks: prompt chunks of the step. decodes: the decodes that get a token, and the blocks that this takes which
            they do not count yet. drafts: tokens that decodes verify beside theirs, as far as the budget allows.
        preempted: whether a sequence was preempted.
    """

    def __init__(
        self, core: Lifecycle, chunks: list[Chunk], prompt_budget: int, drafts: dict[Sequence, int] | None = None
    ) -> None:
        self._core, self._rules = core, core.config.rules
        self.budget, self.prompt_budget = core.config.max_num_batched_tokens, prompt_budget
        self.chunks = chunks
        self.decodes: dict[Sequence, int] = {}
        self.drafts = {} if drafts is None else drafts
        self.preempted = False
        self._order = list(core.running)
        self._index = 0

    def run(self) -> list[Sequence]:
        """Schedule what fits. Returns the decodes that pause."""
        core, order = self._core, self._order
        while self._index < len(order) and self.budget > 0:
            sequence = order[self._index]
            if self._schedule(sequence):
                self._index += 1
            elif not self._rules.goes_on_behind_preempted:
                break
        for sequence in tuple(core.one_shot_running):
            if sequence.state == PREFILLING and self.budget > 0:
                self._schedule(sequence)
        return [sequence for sequence in core.decode_set.sequences if sequence not in self.decodes]

    def num_tokens_left(self) -> int:
        """Prompt tokens that are left of the step."""
        return min(self.budget, self.prompt_budget)

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
            victim = core.preemption_victim(self._order) if sequence in core.running else sequence
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
        self.preempted = True
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
        if position < self._index and (was_scheduled or self._rules.steps_back_for_idle):
            self._index -= 1

    def _withdraw_chunk(self, sequence: Sequence) -> bool:
        """Take the chunk of a sequence out of the step, if there is one."""
        for i, chunk in enumerate(self.chunks):
            if chunk.sequence is sequence:
                self.budget += chunk.tokens
                self.prompt_budget += chunk.tokens
                self._core.prefill_tokens -= chunk.tokens
                del self.chunks[i]
                return True
        return False
