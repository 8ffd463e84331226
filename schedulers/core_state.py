"""The state of an engine's scheduler: where its sequences are, their blocks, and what can be asked of it."""

from __future__ import annotations

from collections import deque

from schedulers.admission_control import AdmissionControl
from schedulers.batches import Batch, DecodeBatch
from schedulers.engine_config import NULL_BLOCKS, EngineConfig
from schedulers.kv_cache import CacheObserver, KVCache
from schedulers.kv_tiers import KVTiers
from schedulers.model_slots import ModelSlots
from schedulers.prefill_policies import CAPACITY_POLICIES, UNLIMITED_TOKENS, BatchWait, FullBatch, PrefillInterval
from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES, PrefixQueue, WaitingQueue
from schedulers.sequence import DecodeSet, Sequence
from schedulers.step_policies import ChunkPolicy
from workloads.request import Request


class CoreState:
    """The state of one engine's scheduler, which `EngineCore` changes.

    Attributes:
        config: the settings. chunk_policy: limits prompt tokens a step besides the settings, or None.
        arrived: sequences that the scheduler has not looked at yet (`scheduler_recv_interval`).
        queues: waiting sequences: [all], or with one-shot limits [generation, one-shot].
        waiting_for_remote_kv: sequences whose cache was computed by a prefill engine, and that wait for admission.
            Those that have their blocks already come first.
        reserved: sequences, by request id, whose cache is coming from a prefill engine into blocks that they have.
        running: sequences that hold a slot, oldest admission first. one_shot_running: those that need none.
        preempted_finishing: sequences that lost their blocks while their last token was being computed.
        awaiting_transfer: finished sequences that keep their blocks until `release`.
        prefix_leaders: first uncached prefix ids of prompts that are being computed.
        sequences: submitted and unfinished sequences by request id.
        max_running: sequences that may hold a slot. watermark_blocks: blocks that an admission leaves free beside them.
        prefill_interval, batch_wait: hold prompts back in some steps. holds_prompts: the next step computes none.
        capacity: counts what running sequences may still take, None where that does not matter. full_batch: remembers a
            batch without room, None where that is found anew.
        prompt_limit: prompt tokens of one sequence in the present step. chunk_unit: parts of prompts are multiples of
            it. shares_tokens: all admitted prompts share a step's tokens. shares_parts: and some get a part of them.
        gates_admission: whether there are tiers or slots, which a waiting sequence may have to wait for.
        outstanding_tokens: prompt tokens plus `max_tokens` of all unfinished requests; routers balance it.
        blocks_allocated_ahead: blocks of coming steady steps that `allocate_ahead` has allocated.
        preemptions, num_admitted, prefill_tokens, cached_tokens: counters of preempted and of admitted sequences, of
            prompt tokens scheduled, and of prompt tokens supplied by the prefix cache.
    """

    def __init__(
        self, config: EngineConfig, chunk_policy: ChunkPolicy | None = None, make_cache: type[KVCache] = KVCache
    ) -> None:
        self.config = config
        self.chunk_policy = chunk_policy
        caching, blocks_per_node = config.enable_prefix_caching, config.prefix_id_tokens // config.block_size
        self.kv_cache = make_cache(config.num_gpu_blocks, config.block_size, blocks_per_node, caching)
        self.kv_tiers = KVTiers(config.kv_offloading, self.kv_cache) if config.kv_offloading is not None else None
        self.model_slots = ModelSlots(config.model_slots) if config.model_slots is not None else None
        self.gates_admission = self.kv_tiers is not None or self.model_slots is not None
        self.decode_set = DecodeSet(config.block_size)
        self.scheduling_policy = SCHEDULING_POLICIES.select(config.scheduling_policy)(**config.scheduling_parameters)
        limits = config.admission_control
        self.admission_control = AdmissionControl(limits) if limits is not None else None
        self.queues = [self.scheduling_policy.make_queue() for _ in range(2 if config.one_shot else 1)]
        self.waiting_for_remote_kv: deque[Sequence] = deque()
        self.reserved: dict[int, Sequence] = {}
        self.running: dict[Sequence, None] = {}
        self.one_shot_running: dict[Sequence, None] = {}
        self.awaiting_transfer: dict[Sequence, None] = {}
        self.prefix_leaders: dict[int, None] = {}
        self.sequences: dict[int, Sequence] = {}
        self.outstanding_tokens = 0
        self.preemptions = self.prefill_tokens = self.cached_tokens = 0
        self.prefilling: dict[Sequence, None] = {}
        self._transferred: list[Sequence] | tuple[()] = ()  # admitted by the latest step begun
        self.preempted_finishing: dict[Sequence, None] = {}
        self._sharing: dict[Sequence, None] = {}  # decodes whose answers other requests may repeat
        interval = config.prefill_schedule_interval
        self.prefill_interval = PrefillInterval(interval) if interval > 1 else None
        self.prompt_limit = UNLIMITED_TOKENS
        self._limits_prompts = config.long_prefill_token_threshold > 0 or interval > 1
        self.max_running = min(config.max_num_active_seqs or config.max_num_seqs, config.max_num_seqs)
        self.watermark_blocks = int(config.watermark * (config.num_gpu_blocks + NULL_BLOCKS))
        rules = self.rules = config.rules
        self.kv_cache.reuse_unhashed_first = rules.reuse_unhashed_first
        self.kv_cache.merges_equal = rules.merges_equal_blocks
        make = CAPACITY_POLICIES[config.capacity_scheduler_policy]
        self.capacity = make(self.kv_cache, config.schedule_conservativeness) if make is not None else None
        self.shares_tokens = config.shares_tokens
        self._keep_settings(config)
        self.prefix_queues = [queue for queue in self.queues if isinstance(queue, PrefixQueue)]
        self._num_ahead = 0  # steps that were in flight when the latest one began
        self._num_submitted = self.num_ended = self.num_admitted = 0
        self.blocks_allocated_ahead = 0
        preemption = "lowest_priority" if config.scheduling_policy == "priority" else "newest"  # as in vLLM
        self.by_importance = PREEMPTION_POLICIES.select(config.preemption_policy or preemption)
        cache_when_computed = config.cache_blocks_on == "computed"
        self._cache_when_computed = cache_when_computed and (caching or config.in_batch_prefix_caching)
        # Tiers are told of a whole answer at once, when it has ended.
        self._shares_growing = not self._cache_when_computed and self.kv_tiers is None
        # Every waiting sequence lacks a slot or blocks, until a change resets this: admission need not be tried.
        self.admission_blocked = False

    def _keep_settings(self, config: EngineConfig) -> None:
        """Keep what is read for every step or sequence: attributes of a compiled class are read faster."""
        self.holds_prompts = False
        self.prompts_first = not config.enable_mixed_chunk
        remembers = self.rules.full_until_smaller and self.prompts_first and self.capacity is not None
        self.full_batch = FullBatch() if remembers else None
        self.chunk_unit = config.chunk_unit_size
        self.arrived: list[Sequence] = []
        self._prompts_step = 0  # the latest step with prompts
        self.max_step_tokens = config.max_num_batched_tokens
        self.leads_prefixes = config.in_batch_prefix_caching
        self.limits_prefills = config.max_prefill_tokens > 0 or config.prefill_max_requests > 0
        self.chunks_prompts = config.enable_chunked_prefill
        self.reserves_full_isl = config.scheduler_reserve_full_isl
        self.reserves_chunk = config.kv_reservation == "chunk" and not config.shares_tokens
        self.reserves_output = config.kv_reservation == "max_tokens"
        self.max_table_blocks = config.max_table_blocks
        self.shares_parts = config.shares_tokens and config.enable_chunked_prefill
        timeout = config.batch_wait_timeout_iters
        enough = config.batch_wait_max_tokens_ratio * config.max_num_batched_tokens
        self.batch_wait = BatchWait(timeout, enough) if timeout else None

    @property
    def step_index(self) -> int:
        """Steps begun so far."""
        return self.decode_set.step_index

    @property
    def model_loads(self) -> int:
        """Models that were loaded into slots so far."""
        return 0 if self.model_slots is None else self.model_slots.loads

    @property
    def num_decodes(self) -> int:
        return self.decode_set.size

    @property
    def num_running(self) -> int:
        """Requests that are admitted and unfinished."""
        return len(self.running) + len(self.one_shot_running)

    @property
    def num_running_seqs(self) -> int:
        """Running requests that count towards `max_num_seqs`: all but one-shot work with a budget of its own."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        waiting = sum(queue.count for queue in self.queues) + len(self.waiting_for_remote_kv)
        waiting += len(self.preempted_finishing) + len(self.arrived)
        return waiting if self.kv_tiers is None else waiting + len(self.kv_tiers.loads)

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in the prefix cache, lower tiers included."""
        kv_cache, ids, tokens = self.kv_cache, request.prefix_blocks, request.prompt_tokens
        if self.kv_tiers is not None:
            return self.kv_tiers.cached_prefix_tokens(ids, tokens)
        return len(kv_cache.match_prefix(ids, tokens)) * kv_cache.node_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError, with the numbers, unless blocks are conserved and each sequence is in one place."""
        self.decode_set.check_integrity()
        if self.admission_control is not None:
            self.admission_control.check_integrity()
        owned = [sequence.blocks for sequence in (*self.sequences.values(), *self.awaiting_transfer)]
        if self.kv_tiers is not None:
            self.kv_tiers.check_integrity()
            owned += [load.blocks for load in (*self.kv_tiers.loads.values(), *self.kv_tiers.orphans)]
        self.kv_cache.check_integrity(owned, self._num_unassigned_blocks())
        if self.model_slots is not None:
            self.model_slots.check_integrity(self.running)
        if len(self.running) > self.config.max_num_seqs:
            raise AssertionError(f"{len(self.running)} sequences run, the limit is {self.config.max_num_seqs}")
        places, reserved, total = self.num_waiting + self.num_running, len(self.reserved), len(self.sequences)
        if places + reserved != total:
            raise AssertionError(f"{places} sequences wait or run and {reserved} are reserved, {total} are unfinished")

    def _num_unassigned_blocks(self) -> int:
        """Blocks of decodes that their `SequenceBlocks` do not count yet."""
        unassigned = self.blocks_allocated_ahead
        for sequence in self.decode_set.sequences:
            if not sequence.blocks_reserved:
                unassigned += self.kv_cache.blocks_for(self.decode_set.num_computed_tokens(sequence))
                unassigned -= self.kv_cache.num_blocks_of(sequence.blocks)
        return unassigned

    def _receive(self) -> None:
        """Queue what has arrived after a step with prompts, so many steps of decodes, or with nothing to run.

        SGLang 0.5.9 `managers/scheduler_recv_skipper.py`.
        """
        idle = not self.decode_set.size and not self.prefilling
        if idle or (self.step_index - self._prompts_step) % self.config.scheduler_recv_interval == 0:
            for sequence in self.arrived:
                self._queue_behind(sequence)
            self.arrived.clear()
            self.admission_blocked = False

    def _queue_behind(self, sequence: Sequence) -> None:
        """Queue a sequence that was submitted earlier behind all that wait."""
        sequence.queue_index = self._num_submitted
        self._num_submitted += 1
        self._queue_of(sequence).push(sequence)

    def has_queued(self) -> bool:
        queues = self.queues
        return queues[0].count > 0 or queues[-1].count > 0

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self.queues[-1 if sequence.one_shot else 0]

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence lacks for `num_tokens` cached tokens; negative if it has more than enough."""
        kv_cache, blocks = self.kv_cache, sequence.blocks
        return kv_cache.blocks_for(num_tokens) - len(blocks.nodes) * kv_cache.blocks_per_node - blocks.num_private

    def shares_answer(self, sequence: Sequence) -> bool:
        """Tell whether a request has ids for its answer, so that later prompts may repeat it."""
        request = sequence.request
        return len(request.prefix_blocks) * self.kv_cache.node_tokens > request.prompt_tokens

    def _cache_answer_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Put the blocks of a prompt and its answer into the prefix cache, where there are ids for the latter."""
        if self.shares_answer(sequence):
            self.kv_cache.cache_blocks(sequence.blocks, sequence.request.prefix_blocks, num_tokens)

    def _cache_growing_answers(self, num_scheduled: int) -> bool:
        """Put the blocks that answers have filled into the prefix cache, before waiting sequences look for them.

        `num_scheduled`: 1 if the step being scheduled has a token of each decode, which counts. Those of steps in
        flight do not, since they are not known. Returns whether a block was put there.
        """
        decode_set, kv_cache = self.decode_set, self.kv_cache
        num_unknown = decode_set.step_index - self.num_ended
        if not num_scheduled:
            num_unknown = min(num_unknown, self._num_ahead)
        grown: list[tuple[int, int, int, Sequence]] = []  # minus the steps since, index of admission, end
        for sequence in self._sharing:
            decodes = sequence in decode_set.sequences
            computed = decode_set.num_computed_tokens(sequence) if decodes else sequence.num_computed_tokens
            num_tokens = computed - num_unknown + (num_scheduled if decodes else 0)
            first = (len(sequence.blocks.nodes) + 1) * kv_cache.node_tokens
            last = min(num_tokens, len(sequence.request.prefix_blocks) * kv_cache.node_tokens)
            if first > last:
                continue
            if decodes and not sequence.blocks_reserved:
                missing = self.num_missing_blocks(sequence, computed + num_scheduled)
                sequence.blocks.num_private += max(missing, 0)  # drafts may have taken more than enough
            since = 0 if decodes else decode_set.step_index + num_scheduled - sequence.left_step  # its latest token
            for end in range(first, last + 1, kv_cache.node_tokens):
                grown.append((end - num_tokens - since, sequence.admission_index, end, sequence))
        grown.sort(key=lambda block: block[:2])  # in the order of scheduling: the first of equals is found
        for _, _, end, sequence in grown:
            kv_cache.cache_blocks(sequence.blocks, sequence.request.prefix_blocks, end)
        return len(grown) > 0

    def num_blocks_to_decode(self, sequence: Sequence) -> int:
        """Blocks that the next token of a decode starts."""
        return int(self.decode_set.needs_block(sequence))

    def allocate_to_decode(self, sequence: Sequence, new_blocks: int) -> int:
        """Allocate the blocks that the next token of a decode starts. Returns those that it does not count yet."""
        self.kv_cache.allocate_unassigned(new_blocks)
        return new_blocks

    def _new_sequence(self, request: Request, one_shot: bool, max_tokens: int | None = None) -> Sequence:
        """A sequence for a request; ValueError for one that is being served, has no prompt, or does not fit alone."""
        if request.id in self.sequences:
            raise ValueError(f"request {request.id}: expected an id that is not being served, found one that is")
        sequence = Sequence(request, self._num_submitted, one_shot)
        if max_tokens is not None:
            sequence.max_tokens = max_tokens
        if request.prompt_tokens < 1:
            raise ValueError(f"request {request.id}: expected a prompt of at least 1 token, found none")
        longest = self.config.max_num_batched_tokens
        if request.prompt_tokens > longest and not self.config.enable_chunked_prefill:
            raise ValueError(
                f"request {request.id}: expected at most {longest} prompt tokens (max_num_batched_tokens) without "
                f"enable_chunked_prefill, found {request.prompt_tokens}"
            )
        tokens = request.prompt_tokens + (0 if sequence.one_shot else sequence.max_tokens - 1)
        blocks = self.kv_cache.blocks_for(tokens)
        if blocks > self.kv_cache.num_blocks:
            raise ValueError(
                f"request {request.id}: expected at most {self.kv_cache.num_blocks} KV blocks, "
                f"{tokens} prompt and output tokens take {blocks}"
            )
        return sequence

    def observe_cache(self, observer: CacheObserver) -> None:
        """Report to `observer` every block that enters or leaves the prefix cache, lower tiers included."""
        if self.kv_tiers is None:
            self.kv_cache.observers.append(observer)
        else:
            self.kv_tiers.listeners.append(observer)

    def steady_decode_steps(self) -> int:
        """The number of coming steps that only decode the same sequences, as long as no request arrives.

        In these steps no sequence is admitted, prefilled or preempted, and none reaches its `max_tokens`. A backend
        that knows when answers end stops earlier.
        """
        decode_set = self.decode_set
        if not decode_set.size or self.prefilling or self.waiting_for_remote_kv:
            return 0
        if not self.admission_blocked and self.has_queued():
            return 0
        steps = decode_set.steps_to_max_tokens() - 1
        if self.arrived:
            interval = self.config.scheduler_recv_interval
            steps = min(steps, -(decode_set.step_index - self._prompts_step) % interval - 1)
        if self._sharing and self.has_queued():
            size = self.kv_cache.block_size  # an answer may fill a block that a waiting sequence finds
            computed = [decode_set.num_computed_tokens(s) for s in self._sharing if s in decode_set.sequences]
            steps = min([steps, *(size - tokens % size - 1 for tokens in computed)])
        return decode_set.steps_within_blocks(self.kv_cache.num_free_blocks, steps)

    def has_blocks_for_steps(self, steps: int) -> bool:
        """Tell whether the free blocks suffice for `steps` further steps of the same decodes."""
        return self.decode_set.steps_within_blocks(self.kv_cache.num_free_blocks, steps) == steps

    def num_new_blocks_by_step(self, steps: int) -> list[int]:
        """Blocks that each of the next `steps` steady decode steps starts."""
        return self.decode_set.num_new_blocks_by_step(steps)

    def current_decode_batch(self) -> Batch:
        """The decode step that `advance` has just begun, for a backend that is a step ahead."""
        decode_set = self.decode_set
        decodes, step_index = tuple(decode_set.sequences), decode_set.step_index
        return DecodeBatch((), decodes, decode_set.kv_tokens, decode_set.longest(), step_index=step_index)

    def _sync_blocks(self, sequence: Sequence) -> None:
        """Assign to a sequence that has just left the decode set the blocks that were allocated for it there."""
        self.admission_blocked = False  # a smaller decode set may let a one-shot prompt run whole, without blocks
        if not sequence.blocks_reserved:
            sequence.blocks.num_private += self.num_missing_blocks(sequence, sequence.num_computed_tokens)
