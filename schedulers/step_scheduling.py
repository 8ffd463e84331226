"""One step of an engine: which tokens of running sequences run in it, and which waiting sequences it admits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedulers.admission import admit
from schedulers.batches import Chunk
from schedulers.lifecycle import Lifecycle, RunningPass, in_units
from schedulers.prefill_policies import FIRST_COME_FIRST_SERVED, UNLIMITED_TOKENS, share_tokens
from schedulers.sequence import DECODING, PREFILLING, Sequence

if TYPE_CHECKING:
    from schedulers.step_policies import ChunkPolicy


class StepScheduling(Lifecycle):
    """The part of `EngineCore` that schedules a step."""

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
            if self.capacity is not None:
                self._note_decodes(True)
            return ()
        if self._prompts_first or self.shares_tokens or self.holds_prompts:
            return self._schedule_apart(chunks)
        if self._limits_prompts:
            self._limit_prompts()
        was_prefilling, preemptions = len(self._prefilling) > 0, self.preemptions
        paused, budget = self._schedule_admitted(chunks)
        if self.preemptions == preemptions and self._has_queued() and (was_prefilling or not self._admission_blocked):
            self._admit_waiting(chunks, budget)
        if self.capacity is not None and not chunks:
            self._note_decodes(self.preemptions == preemptions)
        if self.prefill_interval is not None:
            left_waiting = self._has_queued() if self.preemptions == preemptions else None
            runs = len(chunks) > 0 or self.decode_set.size > 0
            self.prefill_interval.end_step(runs, left_waiting)
        return paused

    def _schedule_admitted(self, chunks: list[Chunk]) -> tuple[list[Sequence] | tuple[()], int]:
        """Schedule decodes and prompts under way. Returns the decodes that pause, and the prompt tokens left."""
        decode_set, prompt_budget = self.decode_set, self.max_step_tokens
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

    def has_prompts(self) -> bool:
        """Tell whether the next step may compute prompt tokens."""
        waits = self._has_queued() and not self._admission_blocked and len(self.running) < self.max_running
        return waits or len(self._prefilling) > 0

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
        competes = self._decode_is_behind_prompt()
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
            if num_tokens:
                budget -= num_tokens
                planned.append((sequence, num_tokens, new_blocks))
        return planned

    def _decode_is_behind_prompt(self) -> bool:
        """Tell whether a decode may stand behind a prompt under way, which then gets its tokens first."""
        num_prompts = sum(1 for sequence in self._prefilling if not sequence.one_shot)
        for sequence in reversed(self.running):
            if sequence.state == DECODING or not num_prompts:
                return num_prompts > 0
            num_prompts -= sequence.state == PREFILLING
        return False

    def _schedule_apart(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """Schedule a step in another order than vLLM's. Returns the decodes that pause."""
        if self.holds_prompts:
            self._schedule_decodes()
            return ()
        return self._schedule_prompts_first(chunks) if self._prompts_first else self._schedule_sharing(chunks)

    def _schedule_prompts_first(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """Schedule prompts alone if there are some to compute, else decodes (SGLang). Returns the decodes that pause.

        SGLang 0.5.9 `managers/scheduler.py`, `get_next_batch_to_run`.
        """
        decode_set, full, budget = self.decode_set, self.full_batch, self.max_step_tokens
        if self.chunk_policy is not None:
            budget = min(budget, self._chunk_limit(self.chunk_policy, 0))
        if self._limits_prompts:
            self._limit_prompts()
        if full is not None:
            full.begin_step()
        preemptions = self.preemptions
        budget -= self._continue_prompts(chunks, budget)
        if self.preemptions == preemptions:
            self._admit_unless_full(chunks, budget)
        if not chunks:
            was_full = full is not None and full.is_full
            self._schedule_decodes()
            if full is not None and was_full and not decode_set.size:
                full.is_full = full.is_full and self._num_ended < decode_set.step_index  # idle, there is room
                self._admit_unless_full(chunks, budget)  # as in the round that follows one without a step
        paused = self._pause(list(decode_set.sequences)) if chunks else ()
        if full is not None:
            if chunks:
                full.scheduled_prompts(len(self.running) <= len(chunks), any(not chunk.last for chunk in chunks))
            self._admission_blocked = full.awaits_change()
        return paused

    def _admit_unless_full(self, chunks: list[Chunk], budget: int) -> None:
        """Admit waiting sequences unless the batch is known to be full."""
        full = self.full_batch
        if not self._has_queued() or (full is not None and full.is_full):
            return
        unseen = 0 if full is None else full.unseen
        self.max_running -= unseen
        self._admit_waiting(chunks, budget)
        self.max_running += unseen

    def _continue_prompts(self, chunks: list[Chunk], budget: int) -> int:
        """Schedule prompts under way within `budget` tokens. Returns the tokens, in whole units.

        Where blocks are short, the sequence that the preemption policy puts last is preempted.
        """
        total = 0
        for sequence in tuple(self._prefilling):
            if sequence.state != PREFILLING or total >= budget:
                continue
            num_tokens = self.num_chunk_tokens(sequence, budget - total)
            new_blocks = self.num_missing_blocks(sequence, sequence.num_computed_tokens + num_tokens)
            while new_blocks > self.kv_cache.num_free_blocks and sequence.state == PREFILLING:
                self.preempt(self.preemption_victim(list(self.running)) if sequence in self.running else sequence)
            if num_tokens and sequence.state == PREFILLING:
                self.kv_cache.allocate(sequence.blocks, max(new_blocks, 0))
                total += in_units(self.schedule_chunk(chunks, sequence, num_tokens), self.chunk_unit)
        return total

    def _schedule_decodes(self) -> None:
        """Give every decode the block that its next token starts; if blocks run out, preempt sequences."""
        preemptions, new_blocks = self.preemptions, self.decode_set.num_new_blocks()
        if new_blocks <= self.kv_cache.num_free_blocks:
            self.kv_cache.allocate_unassigned(new_blocks)
        else:
            running_pass = RunningPass(self, [], 0)
            running_pass.budget = UNLIMITED_TOKENS
            running_pass.run()
        if self._sharing and self._has_queued() and self._cache_growing_answers(1):
            self._admission_blocked = False
        if self.capacity is not None:
            self._note_decodes(self.preemptions == preemptions)

    def _note_decodes(self, all_fit: bool) -> None:
        """Note a step of decodes without prompts, and whether all of them had their blocks."""
        assert self.capacity is not None, "nothing else counts them"
        if not all_fit:
            self.capacity.preempted(self.decode_set)
        elif self.decode_set.size:  # after the last answer there is no step of decodes, only room
            self.capacity.ran_decodes(1)
        if self.full_batch is not None:
            self.full_batch.scheduled_decodes()

    def _schedule_sharing(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """Schedule decodes, admit what fits, and share the other tokens among all prompts (TensorRT-LLM).

        Returns the decodes that pause. TensorRT-LLM 1.3 `capacityScheduler.cpp`, then `microBatchScheduler.cpp`.
        Prompts that are not cut are admitted only beside those that wait.
        """
        decode_set, preemptions = self.decode_set, self.preemptions
        self._schedule_decodes()
        budget = self.max_step_tokens - decode_set.size
        if self.chunk_policy is not None:
            budget = min(budget, self._chunk_limit(self.chunk_policy, decode_set.size))
        if self._limits_prompts:
            self._limit_prompts()
        if self.leads_prefixes:
            for sequence in self._prefilling:
                self._lead(sequence, sequence.num_computed_tokens)
        if self.preemptions == preemptions and self._has_queued() and not self._admission_blocked:
            self._admit_waiting(chunks, budget if self.shares_parts else budget - sum(self._remaining_tokens()))
        if decode_set.size and self.config.capacity_scheduler_policy == "static_batch":
            return ()
        policy = self.config.context_chunking_policy or FIRST_COME_FIRST_SERVED
        shares = share_tokens(policy, self._remaining_tokens(), budget, self.chunk_unit)
        if decode_set.size and any(shares) and self.batch_wait.holds(decode_set.size + sum(shares)):
            return ()
        for sequence, num_tokens in zip(list(self._prefilling), shares, strict=True):
            if num_tokens:
                self.schedule_chunk(chunks, sequence, num_tokens)
        return ()

    def _remaining_tokens(self) -> list[int]:
        """Tokens that each prompt under way may have in this step."""
        return [min(s.num_tokens_to_compute - s.num_computed_tokens, self.prompt_limit) for s in self._prefilling]

    def _admit_waiting(self, chunks: list[Chunk], budget: int) -> None:
        if self.capacity is not None:
            decode_blocks = 0 if self._prompts_first else self.decode_set.num_new_blocks()
            if not self.capacity.begin_admission(self.running, self.decode_set, chunks, decode_blocks):
                return
        if self.full_batch is None or chunks or len(self.running) < self.max_running:  # SGLang looks for a slot first
            for queue in self._prefix_queues:
                queue.sort(self.kv_cache)
        num_admitted = self.num_admitted
        follows_service = self.scheduling_policy.follows_service
        if follows_service:
            self._note_outputs()
        # Another order may put a sequence first that needs fewer blocks, and none that needs no slot.
        lacks_space = admit(self, chunks, budget) and (not follows_service or self._all_lack_slots())
        # These prompts become decodes, beside which a policy may allow smaller chunks that need fewer blocks. One that
        # comes to follow a leader lets those behind it pass.
        self._admission_blocked = lacks_space and (self.chunk_policy is None or not chunks) and not self.prefix_leaders
        if self.capacity is None:
            return
        if self.full_batch is None:
            self._admission_blocked = self._admission_blocked and not self.capacity.loosens
        else:
            used_up = self.num_admitted > num_admitted and self.capacity.is_used_up()
            self.full_batch.is_full = used_up or (lacks_space and self._has_queued())

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
