"""When prompts run: whether blocks suffice to admit one, when all of them wait, how they share a step's tokens.

Capacity policies are those of TensorRT-LLM's capacity scheduler and of SGLang's prefill adder, under the setting
`capacity_scheduler_policy`:

- `max_utilization`: admit while blocks are free, and preempt when they run out. vLLM's rule, too.
- `guaranteed_no_evict`: admit only if all running sequences can reach their `max_tokens` as well.
- `static_batch`: the same, and only while no sequence decodes.
- `new_token_ratio`: admit if a share of the output that running sequences may still have fits. The share falls with
  each decode step, and is estimated anew when sequences had to be preempted.

Sources: TensorRT-LLM 1.3 `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`, `scheduledBlocksManager` and
`KVCacheManager::getRemainingBlocksToCompletion`; SGLang 0.5.9 `managers/schedule_policy.py` (`PrefillAdder`),
`managers/schedule_batch.py` (`retract_decode`) and `managers/scheduler.py` (`update_running_batch`, `batch_is_full`).

All prompts that are admitted may share a step's tokens, by the context chunking policies of TensorRT-LLM 1.3
(`cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp`, `setCtxRequestsChunkSize`). A part of a prompt is a multiple
of the unit, there the tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Final

from schedulers.batches import Chunk
from schedulers.kv_cache import KVCache
from schedulers.sequence import DECODING, FINISHING, DecodeSet, Sequence

MAX_UTILIZATION: Final = "max_utilization"

INITIAL_RATIO: Final = 0.7
MINIMUM_SHARE: Final = 0.14
DECAY_STEPS: Final = 600
"""SGLang's new-token ratio: at first, its least as a share of that, and the decode steps between the two."""

RETRACT_STEPS: Final = 20
"""Decode steps for which a new estimate of the ratio leaves room after a retraction."""

CLIP_MAX_NEW_TOKENS: Final = 4096
"""Output tokens of a sequence that count at most (SGLang)."""


class Capacity:
    """Tells whether a sequence can be admitted, beside the blocks of its own prompt. This one always admits.

    Attributes:
        loosens: whether a sequence that does not fit may fit after some steps of decodes alone.
    """

    loosens = False

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache

    def begin_admission(
        self, running: Iterable[Sequence], decode_set: DecodeSet, chunks: Many[Chunk], decode_blocks: int
    ) -> bool:
        """Note what running sequences may still take. Returns whether any sequence may be admitted in this step.

        `chunks`: of this step. `decode_blocks`: blocks that its decodes were given already.
        """
        return True

    def admits(self, sequence: Sequence, num_cached: int, num_free_blocks: int) -> bool:
        """Tell whether a sequence fits. `num_free_blocks`: without those of the `num_cached` tokens that it finds."""
        return True

    def admitted(self, sequence: Sequence, completes: bool) -> None:
        """Note an admission. `completes`: the step computes the rest of its prompt."""

    def is_used_up(self) -> bool:
        """Tell whether nothing is left for any further sequence."""
        return False

    def ran_decodes(self, steps: int) -> None:
        """Note steps of decodes without prompts."""

    def preempted(self, decode_set: DecodeSet) -> None:
        """Note that sequences were preempted, and which decodes remain."""

    def idle(self) -> None:
        """Note that there is nothing to run."""


class GuaranteedNoEvict(Capacity):
    """Admits what can run to its `max_tokens` beside all that runs. `static`: and only while no sequence decodes."""

    def __init__(self, kv_cache: KVCache, static: bool = False) -> None:
        super().__init__(kv_cache)
        self._static = static
        self._reserved = 0

    def begin_admission(
        self, running: Iterable[Sequence], decode_set: DecodeSet, chunks: Many[Chunk], decode_blocks: int
    ) -> bool:
        if self._static and decode_set.size:
            return False
        kv_cache, reserved = self.kv_cache, -decode_blocks
        for sequence in running:
            if sequence.state == FINISHING:
                continue
            if sequence.state == DECODING and not sequence.blocks_reserved:
                held = kv_cache.blocks_for(decode_set.num_computed_tokens(sequence))
            else:
                held = kv_cache.num_blocks_of(sequence.blocks)
            reserved += max(self._blocks_to_completion(sequence) - held, 0)
        self._reserved = max(reserved, 0)
        return True

    def admits(self, sequence: Sequence, num_cached: int, num_free_blocks: int) -> bool:
        needed = self._blocks_to_completion(sequence) - num_cached // self.kv_cache.block_size
        return needed <= num_free_blocks - self._reserved

    def admitted(self, sequence: Sequence, completes: bool) -> None:
        held = self.kv_cache.num_blocks_of(sequence.blocks)
        self._reserved += max(self._blocks_to_completion(sequence) - held, 0)

    def _blocks_to_completion(self, sequence: Sequence) -> int:
        """Blocks of a sequence with all its output, at most all that there are."""
        tokens = sequence.request.prompt_tokens + sequence.max_tokens
        return min(self.kv_cache.blocks_for(tokens), self.kv_cache.num_blocks)


class NewTokenRatio(Capacity):
    """Reserves a share of the output that decodes may still have, and all of that of sequences that join them.

    Attributes:
        ratio: the share.
    """

    loosens = True

    def __init__(self, kv_cache: KVCache, conservativeness: float = 1.0) -> None:
        super().__init__(kv_cache)
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._minimum = min(self._initial * MINIMUM_SHARE, 1.0)
        self._decay = (self._initial - self._minimum) / DECAY_STEPS
        self.ratio = self._initial
        self._reserved_tokens = 0.0
        self._alone = True

    def begin_admission(
        self, running: Iterable[Sequence], decode_set: DecodeSet, chunks: Many[Chunk], decode_blocks: int
    ) -> bool:
        self._reserved_tokens, ratio = 0.0, self.ratio
        self._alone = True
        for sequence in running:
            self._alone = False
            if sequence.state == DECODING:
                left = sequence.max_tokens - decode_set.num_output_tokens(sequence)
                self._reserved_tokens += min(left, CLIP_MAX_NEW_TOKENS) * ratio
        for chunk in chunks:
            if chunk.last:
                self._reserved_tokens += min(chunk.sequence.max_tokens, CLIP_MAX_NEW_TOKENS)
        return True

    def admits(self, sequence: Sequence, num_cached: int, num_free_blocks: int) -> bool:
        """See `Capacity.admits`. A sequence that would run alone is admitted wherever its prompt fits."""
        left = max(sequence.max_tokens - sequence.num_output_tokens, 0)
        tokens = sequence.num_tokens_to_compute - num_cached + min(left, CLIP_MAX_NEW_TOKENS)
        return self._alone or tokens < num_free_blocks * self.kv_cache.block_size - self._reserved_tokens

    def admitted(self, sequence: Sequence, completes: bool) -> None:
        self._alone = False
        if completes:
            self._reserved_tokens += min(sequence.max_tokens, CLIP_MAX_NEW_TOKENS)

    def is_used_up(self) -> bool:
        return self.kv_cache.num_free_blocks * self.kv_cache.block_size <= self._reserved_tokens

    def ran_decodes(self, steps: int) -> None:
        while steps and self.ratio != self._minimum:
            self.ratio = max(self.ratio - self._decay, self._minimum)
            steps -= 1

    def preempted(self, decode_set: DecodeSet) -> None:
        outputs = max_tokens = 0
        for sequence in decode_set.sequences:
            outputs += decode_set.num_output_tokens(sequence)
            max_tokens += sequence.max_tokens
        self.ratio = min((outputs + RETRACT_STEPS * decode_set.size) / (max_tokens + 1), 1.0)

    def idle(self) -> None:
        self.ratio = self._initial


CAPACITY_POLICIES: Final[dict[str, Callable[[KVCache, float], Capacity] | None]] = {
    MAX_UTILIZATION: None,
    "guaranteed_no_evict": lambda kv_cache, conservativeness: GuaranteedNoEvict(kv_cache),
    "static_batch": lambda kv_cache, conservativeness: GuaranteedNoEvict(kv_cache, static=True),
    "new_token_ratio": NewTokenRatio,
}
"""Makes the policy of one engine, from its cache and `schedule_conservativeness`; None reserves nothing."""


class FullBatch:
    """Remembers that the running batch is full, until it is seen to be smaller (SGLang's `batch_is_full`).

    A sequence that leaves while decodes run is seen by the next step of decodes, so that prompts wait for one more
    such step. One that leaves with its prompt is seen at once, as is a prompt that goes on in the next step. `unseen`:
    sequences that have left, and whose places are not seen to be free.
    """

    def __init__(self) -> None:
        self.is_full = self._renewed = self._after_prompts = False
        self.unseen = 0

    def begin_step(self) -> None:
        if self._renewed:
            self.is_full = self._renewed = False

    def scheduled_prompts(self, alone: bool, goes_on: bool) -> None:
        """Note a step of prompts. `alone`: nothing else runs. `goes_on`: a prompt is not complete with it."""
        self._after_prompts, self._renewed = True, goes_on or (alone and not self.unseen)

    def scheduled_decodes(self) -> None:
        """Note a step of decodes."""
        self._after_prompts = False
        if self.unseen:
            self.is_full, self.unseen = False, 0

    def left(self, latest_ended: bool) -> None:
        """Note that a sequence has left the batch. `latest_ended`: no step is in flight."""
        if self._after_prompts and latest_ended:
            self.is_full = False
        else:
            self.unseen += 1

    def awaits_change(self) -> bool:
        """Tell whether no step considers a waiting sequence until a sequence leaves."""
        return self.is_full and not self._renewed and not self.unseen


UNLIMITED_TOKENS: Final = 1 << 60
"""More tokens than any prompt has."""


class PrefillInterval:
    """Holds prompts back until `interval` steps have passed since the last with prompt tokens (vLLM 0.33).

    It holds none while no sequence decodes, nor after a step that left a request waiting: prompts are then what limits
    the engine. `holds`: whether the present step computes no prompt tokens. `prefills`: whether it has some, other than
    the last one of a prompt that is just admitted.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.holds = self.prefills = False
        self._step, self._last_prefill = 0, -interval
        self._left_waiting = False

    def begin_step(self, decodes: bool) -> None:
        """Decide about the step being scheduled. `decodes`: whether a running sequence has its prompt computed."""
        too_early = self._step + 1 - self._last_prefill < self.interval
        self.holds = decodes and too_early and not self._left_waiting
        self.prefills = False

    def end_step(self, runs: bool, left_waiting: bool | None) -> None:
        """Note whether anything was scheduled, and whether a request was left waiting.

        `left_waiting` is None where none was considered, since a sequence was preempted.
        """
        if runs:
            self._step += 1
        if self.prefills:
            self._last_prefill = self._step
        if not self.holds and left_waiting is not None:
            self._left_waiting = left_waiting


class BatchWait:
    """Holds prompts back beside decodes until a step has `enough` tokens, for at most `timeout_iters` steps.

    TensorRT-LLM 1.2 `_torch/pyexecutor/py_executor.py`, `_waiting_requests`. Steps count that have both.
    """

    def __init__(self, timeout_iters: int, enough: float) -> None:
        self._timeout_iters = timeout_iters
        self.enough = enough
        self._waited = 0

    def holds(self, num_tokens: int) -> bool:
        """Tell whether prompts wait in a step that would have `num_tokens` tokens with them."""
        holds = self._waited < self._timeout_iters and num_tokens < self.enough
        self._waited = self._waited + 1 if holds else 0
        return holds


class PromptBalance:
    """Holds prompts back until all ranks of a group have some, so that a step is not long for the sake of one.

    TensorRT-LLM's `attention_dp_config` (1.2 `_torch/pyexecutor/py_executor.py`, `_balance_adp_requests`). Prompts wait
    for other ranks' for at most `timeout_iters` steps. Once all ranks have some, they wait for more for
    `batching_wait_iters` steps. They do not wait where a rank has nothing to decode. Steps count in which a rank has
    prompts.
    """

    def __init__(self, timeout_iters: int, batching_wait_iters: int) -> None:
        self._timeout_iters = timeout_iters
        self._batching_wait_iters = batching_wait_iters
        self._waited = self._batched = 0

    def holds(self, with_prompts: int, with_decodes: int, with_room: int, ranks: int) -> bool:
        """Tell whether the next step computes no prompts.

        The numbers are those of ranks with prompts to compute, with decodes, and with fewer decodes than may run.
        """
        if not with_prompts:
            return False
        if with_prompts == with_room == ranks:
            self._waited = 0
            if with_decodes == ranks and self._batched < self._batching_wait_iters:
                self._batched += 1
                return True
            self._batched = 0 if with_decodes == ranks else self._batched
            return False
        self._waited += 1
        if self._waited >= self._timeout_iters or with_decodes < ranks:
            self._waited = 0
            return False
        return True


CHUNKING_POLICIES: Final = ("first_come_first_served", "equal_progress")


def share_tokens(policy: str, remaining: Many[int], budget: int, unit: int) -> list[int]:
    """The tokens of each prompt in a step.

    Under `first_come_first_served` each in turn gets as much as is left. Under `equal_progress` each gets a unit in
    turn, or the rest of its prompt, until no further one fits. If all fit, all are whole. `remaining`: tokens that each
    prompt still needs, in the order of admission. `budget`: tokens of the step that prompts may have.
    """
    if sum(remaining) <= budget:
        return list(remaining)
    shares = [0] * len(remaining)
    if policy == "equal_progress":
        grows = True
        while grows and budget > 0:
            grows = False
            for i, tokens in enumerate(remaining):
                part = min(unit, tokens - shares[i])
                if 0 < part <= budget:
                    shares[i] += part
                    budget -= part
                    grows = True
        return shares
    for i, tokens in enumerate(remaining):
        shares[i] = tokens if tokens <= budget else max(budget, 0) // unit * unit
        budget -= shares[i]
    return shares
