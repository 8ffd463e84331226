"""How sequences get prompt tokens and leave an engine's running set: preempted, finished or aborted.

A block is *hashed*, in vLLM's word, when the tokens that fill it are computed and known, so that a prompt can find it.
Freed blocks are evicted in the order in which they were freed if they are hashed, and before all others if not.
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
