"""Steps in other orders than vLLM's: prompts before decodes (SGLang), and prompts that share a step (TensorRT-LLM)."""

from __future__ import annotations

from schedulers.admission import admit_waiting
from schedulers.batches import Chunk
from schedulers.lifecycle import Lifecycle, in_units
from schedulers.prefill_policies import CHUNKING_POLICIES, share_tokens
from schedulers.sequence import PREFILLING, Sequence


def schedule_prompts_first(core: Lifecycle, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
    """Schedule prompts alone if there are some to compute, else decodes (SGLang). Returns the decodes that pause.

    SGLang 0.5.9 `managers/scheduler.py`, `get_next_batch_to_run`.
    """
    decode_set, full, budget = core.decode_set, core.full_batch, core.prompt_budget(0)
    core.limit_prompts()
    if full is not None:
        full.begin_step()
    preemptions = core.preemptions
    budget -= _continue_prompts(core, chunks, budget)
    if core.preemptions == preemptions:
        _admit_unless_full(core, chunks, budget)
    if not chunks:
        was_full = full is not None and full.is_full
        core.schedule_decodes()
        if full is not None and was_full and not decode_set.size:
            full.is_full = full.is_full and core.num_ended < decode_set.step_index  # idle, there is room
            _admit_unless_full(core, chunks, budget)  # as in the round that follows one without a step
    paused = core.pause(list(decode_set.sequences)) if chunks else ()
    if full is not None:
        if chunks:
            full.scheduled_prompts(len(core.running) <= len(chunks), any(not chunk.last for chunk in chunks))
        core.admission_blocked = full.awaits_change()
    return paused


def _admit_unless_full(core: Lifecycle, chunks: list[Chunk], budget: int) -> None:
    full = core.full_batch
    if not core.has_queued() or (full is not None and full.is_full):
        return
    unseen = 0 if full is None else full.unseen
    core.max_running -= unseen
    admit_waiting(core, chunks, budget)
    core.max_running += unseen


def _continue_prompts(core: Lifecycle, chunks: list[Chunk], budget: int) -> int:
    """Schedule prompts under way within `budget` tokens. Returns the tokens, in whole units.

    Where blocks are short, the sequence that the preemption policy puts last is preempted.
    """
    total = 0
    for sequence in tuple(core.prefilling):
        if sequence.state != PREFILLING or total >= budget:
            continue
        num_tokens = core.num_chunk_tokens(sequence, budget - total)
        new_blocks = core.num_missing_blocks(sequence, sequence.num_computed_tokens + num_tokens)
        while new_blocks > core.kv_cache.num_free_blocks and sequence.state == PREFILLING:
            core.preempt(core.by_importance(list(core.running))[-1] if sequence in core.running else sequence)
        if num_tokens and sequence.state == PREFILLING:
            core.kv_cache.allocate(sequence.blocks, max(new_blocks, 0))
            total += in_units(core.schedule_chunk(chunks, sequence, num_tokens), core.chunk_unit)
    return total


def schedule_sharing(core: Lifecycle, chunks: list[Chunk]) -> None:
    """Schedule decodes, admit what fits, and share the other tokens among all prompts (TensorRT-LLM).

    TensorRT-LLM 1.3 `capacityScheduler.cpp`, then `microBatchScheduler.cpp`. Prompts that are not cut are admitted only
    beside those that wait.
    """
    decode_set, preemptions = core.decode_set, core.preemptions
    core.schedule_decodes()
    budget = min(core.max_step_tokens - decode_set.size, core.prompt_budget(decode_set.size))
    core.limit_prompts()
    if core.leads_prefixes:
        for sequence in core.prefilling:
            core.lead(sequence, sequence.num_computed_tokens)
    if core.preemptions == preemptions and core.has_queued() and not core.admission_blocked:
        admit_waiting(core, chunks, budget if core.shares_parts else budget - sum(_remaining_tokens(core)))
    if decode_set.size and core.config.capacity_scheduler_policy == "static_batch":
        return
    policy = core.config.context_chunking_policy or CHUNKING_POLICIES[0]
    shares = share_tokens(policy, _remaining_tokens(core), budget, core.chunk_unit)
    wait = core.batch_wait if decode_set.size and any(shares) else None
    if wait is not None and wait.holds(decode_set.size + sum(shares)):
        return
    for sequence, num_tokens in zip(list(core.prefilling), shares, strict=True):
        if num_tokens:
            core.schedule_chunk(chunks, sequence, num_tokens)


def _remaining_tokens(core: Lifecycle) -> list[int]:
    """Tokens that each prompt under way may have in this step."""
    return [min(s.num_tokens_to_compute - s.num_computed_tokens, core.prompt_limit) for s in core.prefilling]
