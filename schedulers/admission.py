"""Greedy admission of waiting sequences to a step, from several queues (Prelude 3, "Scheduler policy").

Sequences whose prompts a prefill engine computes wait apart: their caches come from there, and then they need a slot.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from schedulers.batches import Chunk
from schedulers.core_state import CoreState
from schedulers.engine_config import OneShotBudget
from schedulers.kv_cache import PrefixNode
from schedulers.kv_tiers import KVTiers
from schedulers.lifecycle import Lifecycle, in_units, whole_units
from schedulers.model_slots import ADMITS, OTHERS_MAY
from schedulers.prefill_policies import UNLIMITED_TOKENS
from schedulers.scheduling_policies import WaitingQueue
from schedulers.sequence import PREFILLING, Sequence, uncached_prefix_key

# Why the first sequence of a queue gets no tokens in this step, in place of their number.
NO_BUDGET: Final = 0  # the token budget of this step is used up
NO_SPACE: Final = -1  # there is no slot or too few blocks, until a running sequence leaves
DEFERRED: Final = -2  # it waits a step: another one computes its prefix, or its task differs from the step's
LOADING: Final = -3  # it has left the queue: its prefix is being loaded from a tier below the device
AWAITS_LOAD: Final = -4  # a part of its prefix is being loaded for another one
NO_SLOT: Final = -5  # no slot for its model is free; sequences behind it may have other models
ADMITTED: Final = -6  # it has been admitted, and shares the step's tokens with other prompts


def admit_waiting(core: Lifecycle, chunks: list[Chunk], budget: int) -> None:
    """Admit waiting sequences to the step, within `budget` prompt tokens."""
    if core.capacity is not None:
        decode_blocks = 0 if core.prompts_first else core.decode_set.num_new_blocks()
        if not core.capacity.begin_admission(core.running, core.decode_set, chunks, decode_blocks):
            return
    if core.full_batch is None or chunks or len(core.running) < core.max_running:  # SGLang looks for a slot first
        for queue in core.prefix_queues:
            queue.sort(core.kv_cache)
    num_admitted = core.num_admitted
    follows_service = core.scheduling_policy.follows_service
    if follows_service:
        core.note_outputs()
    lacks_space = _admit(core, chunks, budget)
    if follows_service:  # another order may put a sequence first that needs fewer blocks, and none without a slot
        only_queue = len(core.queues) == 1 or not core.queues[-1].count
        lacks_space = lacks_space and only_queue and len(core.running) >= core.max_running
    # These prompts become decodes, beside which a policy may allow smaller chunks that need fewer blocks. One that
    # comes to follow a leader lets those behind it pass.
    core.admission_blocked = lacks_space and (core.chunk_policy is None or not chunks) and not core.prefix_leaders
    if core.capacity is None:
        return
    if core.full_batch is None:
        core.admission_blocked = core.admission_blocked and not core.capacity.loosens
    else:
        used_up = core.num_admitted > num_admitted and core.capacity.is_used_up()
        core.full_batch.is_full = used_up or (lacks_space and core.has_queued())


def _admit(core: Lifecycle, chunks: list[Chunk], budget: int) -> bool:
    """Admit waiting sequences within the token, slot and block limits, and append their chunks to `chunks`.

    Queues are served in the common order of their policy. A full queue does not block the other queue. A one-shot
    prompt may wait for the next step because only that step can hold it whole. Then chats behind it begin only if they
    leave no prompt tokens for that step. Returns whether every sequence that still waits lacks a slot or blocks.
    """
    open_queues = [queue for queue in core.queues if queue.count]
    lacks_space = True
    deferred: list[Sequence] = []
    limits = core.config.one_shot if len(core.queues) > 1 else None
    one_shot = OneShotStepBudget(limits, chunks, budget) if limits else None
    while open_queues:
        queue = _next_queue(open_queues) if len(open_queues) > 1 else open_queues[0]
        sequence = queue.peek()
        if sequence is None:
            open_queues.remove(queue)
            continue
        if one_shot is not None and sequence.one_shot:
            num_tokens = _try_admit_one_shot(core, chunks, budget, sequence, one_shot)
        else:
            num_tokens = _try_admit(core, chunks, budget, sequence, one_shot is not None and one_shot.prompt_deferred)
        if num_tokens > 0:
            budget -= in_units(num_tokens, core.chunk_unit)
            if core.capacity is not None and (budget <= 0 or _prefill_tokens_left(core, chunks) <= 0):
                lacks_space = False
                break
        elif num_tokens == DEFERRED:
            deferred.append(queue.pop())
            lacks_space = False
        elif num_tokens in (AWAITS_LOAD, NO_SLOT):
            deferred.append(queue.pop())
        elif num_tokens not in (LOADING, ADMITTED):
            open_queues.remove(queue)
            lacks_space = lacks_space and num_tokens == NO_SPACE
    for sequence in deferred:
        core.queues[-1 if sequence.one_shot else 0].requeue(sequence)
    return lacks_space


def _next_queue(queues: list[WaitingQueue]) -> WaitingQueue:
    """The queue whose first sequence has the smallest key, or a queue that is empty."""
    for queue in queues:
        if queue.peek() is None:
            return queue
    return min(queues, key=lambda queue: queue.peek_key())


def _try_admit(core: Lifecycle, chunks: list[Chunk], budget: int, sequence: Sequence, whole_only: bool) -> int:
    """Admit the first sequence of the ordinary queue: tokens of its first chunk (`whole_only`: all), or the reason."""
    kv_cache = core.kv_cache
    if len(core.running) >= core.max_running:
        return NO_SPACE
    if _lacks_budget(core, chunks, budget):
        return NO_BUDGET
    nodes, num_cached, reclaimable = _get_computed_blocks(core, sequence)
    if core.prefix_leaders or core.gates_admission or core.capacity is not None:
        reason = _awaits_slot_prefix_or_room(core, sequence, nodes, num_cached, reclaimable)
        if reason:
            return reason
    num_tokens = _first_chunk(core, chunks, sequence.num_tokens_to_compute - num_cached, budget)
    part = num_cached + num_tokens < sequence.num_tokens_to_compute
    if not core.shares_parts and (not num_tokens or (whole_only and part)):
        return NO_BUDGET
    reserved_blocks = kv_cache.blocks_for(_reserved_tokens(core, sequence, num_cached + num_tokens))
    supplied = len(nodes) * kv_cache.blocks_per_node + reclaimable
    new_blocks = max(reserved_blocks - supplied, 0)
    required = reclaimable + _blocks_that_must_be_free(core, sequence, supplied, new_blocks)
    if (kv_cache.free_blocks_needed(nodes, required) if nodes else required) > kv_cache.num_free_blocks:
        return _too_few_blocks(core, nodes)
    if core.max_table_blocks and _block_table_is_full(core, reserved_blocks):
        return NO_SPACE
    core.queues[0].pop()
    if num_cached or sequence.blocks.freed_run is not None:
        kv_cache.attach(sequence.blocks, nodes)
        kv_cache.reclaim(sequence.blocks, reclaimable)
    kv_cache.allocate(sequence.blocks, new_blocks)
    sequence.blocks_reserved = core.reserves_output
    start_prefill(core, sequence, num_cached)
    core.running[sequence] = None
    if core.capacity is not None:
        core.capacity.admitted(sequence, not part)
    return _begin_prompt(core, chunks, sequence, num_tokens)


def _begin_prompt(core: Lifecycle, chunks: list[Chunk], sequence: Sequence, num_tokens: int) -> int:
    if not core.shares_tokens:
        return core.schedule_chunk(chunks, sequence, num_tokens)
    core.prefilling[sequence] = None  # from now on
    if core.leads_prefixes:
        core.lead(sequence, sequence.num_computed_tokens)
    return ADMITTED if core.shares_parts else num_tokens


def _lacks_budget(core: Lifecycle, chunks: Many[Chunk], budget: int) -> bool:
    """Tell whether no further prompt may begin in this step. Capacity is counted even if there are no tokens."""
    if budget <= 0 and core.capacity is None and not core.shares_tokens:
        return True
    return core.limits_prefills and len(chunks) >= (core.config.prefill_max_requests or UNLIMITED_TOKENS)


def _first_chunk(core: Lifecycle, chunks: Many[Chunk], remaining: int, budget: int) -> int:
    """Tokens of the first chunk of a prompt that has `remaining` tokens to compute; 0 if it has none in this step."""
    if core.prefill_interval is not None and core.prefill_interval.holds and remaining > 1:
        return 0
    num_tokens, unit = min(remaining, core.prompt_limit), core.chunk_unit
    if num_tokens > budget and not core.chunks_prompts:
        return 0
    if core.limits_prefills and chunks and in_units(remaining, unit) >= _prefill_tokens_left(core, chunks):
        return 0
    if unit == 1:
        return max(min(num_tokens, budget), 0)
    return whole_units(remaining, max(min(budget, core.prompt_limit), 0), unit)


def _prefill_tokens_left(core: Lifecycle, chunks: Many[Chunk]) -> int:
    """Prompt tokens below which a further prompt may begin in this step."""
    if not core.config.max_prefill_tokens:
        return UNLIMITED_TOKENS
    decodes = core.decode_set.size if core.config.enable_mixed_chunk else 0
    return core.config.max_prefill_tokens - decodes - sum(in_units(chunk.tokens, core.chunk_unit) for chunk in chunks)


def _blocks_that_must_be_free(core: Lifecycle, sequence: Sequence, supplied: int, new_blocks: int) -> int:
    """Free blocks without which a sequence is not admitted, though it takes only `new_blocks` of them at first.

    A part of a prompt in the cache would only be preempted for it. `supplied`: blocks that the prefix cache supplies.
    """
    required = new_blocks
    if core.reserves_full_isl:
        required = max(required, core.kv_cache.blocks_for(sequence.num_tokens_to_compute) - supplied)
    if core.running:
        required += core.watermark_blocks
    return required


def _reserved_tokens(core: Lifecycle, sequence: Sequence, computed: int) -> int:
    """Tokens that get blocks at admission, if the first chunk makes it `computed` tokens."""
    if core.reserves_chunk:
        return computed
    if core.reserves_output:
        return sequence.request.prompt_tokens + sequence.max_tokens - 1
    return sequence.num_tokens_to_compute


def _get_computed_blocks(core: Lifecycle, sequence: Sequence) -> tuple[list[PrefixNode], int, int]:
    """Prefix nodes and tokens that the cache supplies, and the blocks among them that a preempted sequence reclaims.

    The last token is always computed, since its output is needed.
    """
    kv_cache = core.kv_cache
    if not sequence.request.prefix_blocks and sequence.blocks.freed_run is None:
        return [], 0, 0
    max_cached = sequence.num_tokens_to_compute - 1
    nodes = kv_cache.match_prefix(sequence.request.prefix_blocks, max_cached)
    num_cached = len(nodes) * kv_cache.node_tokens
    max_blocks = (max_cached - num_cached) // kv_cache.block_size
    reclaimable = kv_cache.num_reclaimable(sequence.blocks, len(nodes), max_blocks)
    return nodes, num_cached + reclaimable * kv_cache.block_size, reclaimable


def _awaits_slot_prefix_or_room(
    core: Lifecycle, sequence: Sequence, nodes: Many[PrefixNode], num_cached: int, reclaimable: int
) -> int:
    """The reason why a sequence waits for a slot for its model, the rest of its prefix, or room beside others; or 0."""
    if core.model_slots is not None and (waits := core.model_slots.admission(sequence)):
        return NO_SLOT if waits == OTHERS_MAY else NO_SPACE
    reason = _awaits_prefix(core, sequence, nodes, reclaimable)
    if not reason and core.capacity is not None:
        free_blocks = core.kv_cache.num_free_blocks - core.kv_cache.free_blocks_needed(nodes, reclaimable)
        return 0 if core.capacity.admits(sequence, num_cached, free_blocks) else NO_SPACE
    return reason


def _awaits_prefix(core: Lifecycle, sequence: Sequence, nodes: Many[PrefixNode], reclaimable: int) -> int:
    """The reason why a sequence waits for the rest of its prefix, or 0."""
    if core.prefix_leaders and uncached_prefix_key(sequence, len(nodes)) in core.prefix_leaders:
        return DEFERRED  # a prompt under way computes the first prefix block that it misses
    return _load_prefix(core, core.kv_tiers, sequence, nodes, reclaimable) if core.kv_tiers is not None else 0


def _load_prefix(core: Lifecycle, tiers: KVTiers, sequence: Sequence, nodes: Many[PrefixNode], reclaimable: int) -> int:
    """Begin to load the prefix of the first sequence of a queue, as far as tiers continue what the device has.

    Returns why it is not admitted now: LOADING, AWAITS_LOAD, or NO_SPACE; 0 if there is nothing to load.
    """
    request = sequence.request
    if sequence.prefix_loaded or not request.prefix_blocks:
        return 0
    tokens = min(sequence.num_tokens_to_compute - 1, request.prompt_tokens)
    sources = tiers.lookup(nodes, request.prefix_blocks, tokens)
    new_blocks = len(sources) * core.kv_cache.blocks_per_node
    if new_blocks <= reclaimable:
        return 0
    if tiers.is_loading(sources):
        return AWAITS_LOAD
    if core.kv_cache.free_blocks_needed(nodes, new_blocks) > core.kv_cache.num_free_blocks:
        return _too_few_blocks(core, nodes)
    core.queues[-1 if sequence.one_shot else 0].pop()
    tiers.begin(sequence, nodes, sources)
    return LOADING


def _too_few_blocks(core: Lifecycle, nodes: Many[PrefixNode]) -> int:
    """The reason when blocks are short: permanent until a sequence leaves, unless eviction can change the need.

    A node of several blocks is evicted whole when one of its blocks is allocated. A sequence that finds less of its
    prefix cached then needs fewer blocks for its first chunk, by more than were allocated.
    """
    return NO_BUDGET if nodes and core.kv_cache.blocks_per_node > 1 else NO_SPACE


def _block_table_is_full(core: Lifecycle, new_entries: int) -> bool:
    entries = 0
    for sequence in core.running:
        decoding = sequence in core.decode_set.sequences
        cached = core.decode_set.num_computed_tokens(sequence) if decoding else sequence.num_computed_tokens
        entries += core.kv_cache.blocks_for(cached)
    return bool(core.running) and entries + new_entries > core.max_table_blocks


def start_prefill(core: Lifecycle, sequence: Sequence, num_cached: int) -> None:
    """Mark a sequence as prefilling after the tokens that the cache supplies."""
    sequence.state = PREFILLING
    core.num_admitted += 1
    sequence.admission_index = core.num_admitted
    sequence.num_computed_tokens = sequence.num_cached_tokens = num_cached
    core.cached_tokens += num_cached
    if core.model_slots is not None:
        core.model_slots.enter(sequence)


class OneShotStepBudget:
    """The limits that are left to one-shot work in a step, and the model and task of the one-shot work in it.

    `tokens`, `sequences`: what is left. `whole_prompt_tokens`: longest prompt that a step with these decodes and no
    other prompts holds whole. `prompt_deferred`: a prompt waits for the next step, which does.
    """

    def __init__(self, limits: OneShotBudget, chunks: Many[Chunk], budget: int) -> None:
        """`chunks` are in the step already and leave `budget` tokens of it."""
        self.tokens = limits.max_step_tokens()
        self.sequences = limits.sequences
        self.whole_prompt_tokens = min(self.tokens, budget + sum(chunk.tokens for chunk in chunks))
        self.model_and_task: tuple[str, str] | None = None
        self.prompt_deferred = False
        for chunk in chunks:
            if chunk.sequence.one_shot:
                self.spend(chunk.sequence, chunk.tokens)

    def spend(self, sequence: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` tokens of a prompt that is now in the step."""
        self.tokens -= num_tokens
        self.sequences -= 1
        self.model_and_task = sequence.request.model, sequence.request.task


def _try_admit_one_shot(
    core: Lifecycle, chunks: list[Chunk], budget: int, sequence: Sequence, step: OneShotStepBudget
) -> int:
    """Admit the first sequence of the one-shot queue: the rest of its prompt in one pass, or the reason for none.

    A request of another model or task than the step's waits for a later step, since its output head differs. A prompt
    that would be whole without the other work in this step waits for the next. A prompt that no step can hold whole is
    chunked over KV blocks like any other, and still takes no slot.
    """
    budget = min(budget, step.tokens)
    if budget <= 0 or step.sequences <= 0:
        return NO_BUDGET
    request = sequence.request
    if step.model_and_task not in (None, (request.model, request.task)):
        return DEFERRED
    kv_cache = core.kv_cache
    nodes, num_cached, reclaimable = _get_computed_blocks(core, sequence)
    reason = _awaits_prefix(core, sequence, nodes, reclaimable)
    if reason:
        return reason
    num_tokens = sequence.num_tokens_to_compute - num_cached
    if num_tokens <= budget:
        new_blocks = _blocks_worth_caching(core, sequence, nodes, reclaimable)
    elif num_tokens <= step.whole_prompt_tokens:
        step.prompt_deferred = True
        return NO_BUDGET
    else:
        num_tokens = budget
        available = len(nodes) * kv_cache.blocks_per_node + reclaimable
        new_blocks = kv_cache.blocks_for(num_cached + num_tokens) - available
    if kv_cache.free_blocks_needed(nodes, new_blocks + reclaimable) > kv_cache.num_free_blocks:
        return _too_few_blocks(core, nodes)
    core.queues[-1].pop()
    kv_cache.attach(sequence.blocks, nodes)
    kv_cache.reclaim(sequence.blocks, reclaimable)
    kv_cache.allocate(sequence.blocks, new_blocks)
    step.spend(sequence, num_tokens)
    start_prefill(core, sequence, num_cached)
    core.one_shot_running[sequence] = None
    return core.schedule_chunk(chunks, sequence, num_tokens)


def _blocks_worth_caching(core: Lifecycle, sequence: Sequence, nodes: Many[PrefixNode], reclaimable: int) -> int:
    """Blocks besides its `reclaimable` ones that keep the shareable part of a one-shot prompt; 0 if they are short."""
    kv_cache = core.kv_cache
    if not kv_cache.enable_caching:
        return 0
    shareable = min(len(sequence.request.prefix_blocks), sequence.num_tokens_to_compute // kv_cache.node_tokens)
    new_blocks = max((shareable - len(nodes)) * kv_cache.blocks_per_node - reclaimable, 0)
    fits = kv_cache.free_blocks_needed(nodes, new_blocks + reclaimable) <= kv_cache.num_free_blocks
    return new_blocks if fits else 0


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
    output = sequence.max_tokens - 1 if core.reserves_output else 1
    return core.kv_cache.blocks_for(sequence.request.prompt_tokens + output)


def allocate_transferred(core: CoreState, sequence: Sequence) -> None:
    """Allocate the blocks of a sequence prefilled elsewhere."""
    output = sequence.max_tokens - 1 if core.reserves_output else 0
    core.kv_cache.allocate(sequence.blocks, core.kv_cache.blocks_for(sequence.request.prompt_tokens + output))
    sequence.blocks_reserved = core.reserves_output
