"""Schedules running sequences one by one, in vLLM's order, where blocks or tokens do not suffice for all of them.

Each in turn, oldest admission first, gets its next tokens and their blocks. Where blocks are short, the sequence that
the preemption policy puts last is preempted, until there are enough or the sequence has preempted itself. As in vLLM
this may be one that has just been scheduled, or one whose last token is still being computed by a step in flight.
Decodes for which no tokens remain pause for the step.
"""

from __future__ import annotations

from schedulers.batches import Chunk
from schedulers.lifecycle import Lifecycle
from schedulers.sequence import DECODING, PREFILLING, Sequence


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
