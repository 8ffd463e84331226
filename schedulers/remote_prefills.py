"""Sequences whose prompts a prefill engine computes: their caches come from there, and they then wait for a slot."""

from __future__ import annotations

from schedulers.core_state import CoreState
from schedulers.model_slots import ADMITS
from schedulers.sequence import Sequence


def admit_transferred(core: CoreState) -> list[Sequence]:
    """Admit sequences prefilled elsewhere within the slot and block limits.

    Preempted sequences go first, but those that have their blocks do not wait: they alone can free them.
    """
    waiting, admitted, slots = core.waiting_for_remote_kv, [], core.model_slots
    while waiting and len(core.running) < core.config.max_num_seqs:
        sequence = waiting[0]
        reserved = sequence.blocks.num_private > 0
        if not reserved and (core.queues[0].count or blocks_to_admit(core, sequence) > core.kv_cache.num_free_blocks):
            break
        if slots is not None:
            if slots.admission(sequence) != ADMITS:
                break
            slots.enter(sequence)
        if not reserved:
            allocate_transferred(core, sequence)
        admitted.append(waiting.popleft())
        sequence.num_computed_tokens = sequence.request.prompt_tokens
        core.running[sequence] = None
        core.num_admitted += 1
        sequence.admission_index = core.num_admitted
        core.decode_set.add(sequence)
    return admitted


def blocks_to_admit(core: CoreState, sequence: Sequence) -> int:
    """Free blocks that a sequence prefilled elsewhere needs: those of its prompt and of the next token at least."""
    reserve_output = core.config.kv_reservation == "max_tokens"
    output = sequence.max_tokens - 1 if reserve_output else 1
    return core.kv_cache.blocks_for(sequence.request.prompt_tokens + output)


def allocate_transferred(core: CoreState, sequence: Sequence) -> None:
    """Allocate the blocks of a sequence prefilled elsewhere."""
    reserve_output = core.config.kv_reservation == "max_tokens"
    output = sequence.max_tokens - 1 if reserve_output else 0
    core.kv_cache.allocate(sequence.blocks, core.kv_cache.blocks_for(sequence.request.prompt_tokens + output))
    sequence.blocks_reserved = reserve_output


def complete_reserved(core: CoreState, sequence: Sequence) -> Sequence:
    """A reserved sequence's cache has come: it waits for a slot, behind those that came before it."""
    sequence.num_output_tokens = 1
    waiting = core.waiting_for_remote_kv
    place = sum(1 for candidate in waiting if candidate.blocks.num_private)
    waiting.insert(place, sequence)
    return sequence
