"""Capacity policies: admit a sequence if blocks suffice, given what running ones may still take.

The policies are those of TensorRT-LLM's capacity scheduler and of SGLang's prefill adder, under the setting
`capacity_scheduler_policy`:

- `max_utilization`: admit while blocks are free, and preempt when they run out. vLLM's rule, too.
- `guaranteed_no_evict`: admit only if all running sequences can reach their `max_tokens` as well.
- `static_batch`: the same, and only while no sequence decodes.
- `new_token_ratio`: admit if a share of the output that running sequences may still have fits. The share falls with
  each decode step, and is estimated anew when sequences had to be preempted.

Sources: TensorRT-LLM 1.3 `cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`, `scheduledBlocksManager` and
`KVCacheManager::getRemainingBlocksToCompletion`; SGLang 0.5.9 `managers/schedule_policy.py` (`PrefillAdder`),
`managers/schedule_batch.py` (`retract_decode`) and `managers/scheduler.py` (`update_running_batch`, `batch_is_full`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Final

from schedulers.batches import Chunk
from schedulers.decode_set import DecodeSet
from schedulers.kv_cache import KVCache
from schedulers.sequence import DECODING, FINISHING, Sequence

MAX_UTILIZATION: Final = "max_utilization"
CAPACITY_POLICIES: Final = (MAX_UTILIZATION, "guaranteed_no_evict", "static_batch", "new_token_ratio")

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

        Args:
            chunks: of this step. decode_blocks: blocks that its decodes were given already.
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


def make_capacity(policy: str, kv_cache: KVCache, conservativeness: float) -> Capacity | None:
    """The policy of one engine; None for `max_utilization`, which reserves nothing."""
    if policy == MAX_UTILIZATION:
        return None
    if policy == "new_token_ratio":
        return NewTokenRatio(kv_cache, conservativeness)
    return GuaranteedNoEvict(kv_cache, static=policy == "static_batch")


class FullBatch:
    """Remembers that the running batch is full, until it is seen to be smaller (SGLang's `batch_is_full`).

    A sequence that leaves while decodes run is seen by the next step of decodes, so that prompts wait for one more
    such step. One that leaves with its prompt is seen at once, as is a prompt that goes on in the next step.

    Attributes:
        is_full: whether waiting sequences are not even considered. unseen: sequences that have left, and whose places
            are not seen to be free.
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


def make_full_batch(remembers: bool, capacity: Capacity | None) -> FullBatch | None:
    """A memory of full batches, for a scheduler that has one and counts capacity."""
    return FullBatch() if remembers and capacity is not None else None
