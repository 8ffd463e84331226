"""Longest prefix first: waiting sequences in the order of what the prefix cache has of their prompts.

SGLang's `schedule_policy: lpm` (0.5.9 `managers/schedule_policy.py`). The order is found anew whenever sequences are
considered. Equal ones keep the order that they had. Of sequences that find little in the cache and begin alike, all but
one go last, so that the first computes their prefix for all. With a long queue, nothing is reordered.
"""

from __future__ import annotations

from typing import Final

from schedulers.kv_cache import PATH_HASHES, KVCache
from schedulers.sequence import Sequence
from schedulers.waiting_queue import SCHEDULING_POLICIES

LONGEST_QUEUE: Final = 128
"""Waiting sequences up to which they are reordered."""

IN_BATCH_TOKENS: Final = 32
"""Sequences that find at most so many tokens in the cache, and share at least so many, wait for one of them."""


class PrefixQueue:
    """Waiting sequences, in the order of their arrival until `sort` finds another.

    Attributes:
        count: waiting sequences.
    """

    def __init__(self) -> None:
        self.count = 0
        self._sequences: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        self.count += 1
        self._sequences.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """See `WaitingQueue.requeue`: before all others."""
        self.count += 1
        self._sequences.insert(0, sequence)

    def peek(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def peek_key(self) -> tuple[float, ...]:
        return (float(self._sequences[0].queue_index),)

    def pop(self) -> Sequence:
        self.count -= 1
        return self._sequences.pop(0)

    def remove(self, sequence: Sequence) -> None:
        self.count -= 1
        self._sequences.remove(sequence)

    def sort(self, kv_cache: KVCache) -> None:
        """Put sequences that find most tokens in the cache first."""
        if self.count > LONGEST_QUEUE or self.count < 2:
            return
        ranks: dict[Sequence, float] = {}
        begun: set[int] = set()
        for sequence in self._sequences:
            ids, tokens = sequence.request.prefix_blocks, sequence.num_tokens_to_compute
            found = len(kv_cache.match_prefix(ids, tokens)) * kv_cache.node_tokens
            ranks[sequence] = -float(found)
            if found <= IN_BATCH_TOKENS:
                hashes = PATH_HASHES.of(ids)[: tokens // kv_cache.node_tokens]
                shared = 0
                while shared < len(hashes) and hashes[shared] in begun:
                    shared += 1
                if shared * kv_cache.node_tokens >= IN_BATCH_TOKENS:
                    ranks[sequence] = float("inf")
                else:
                    begun.update(hashes)
        self._sequences.sort(key=ranks.__getitem__)


class LongestPrefix:
    """The policy: see above."""

    follows_service = False

    def make_queue(self) -> PrefixQueue:
        return PrefixQueue()

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """See `SchedulingPolicy.on_scheduled`: without effect."""

    def on_output(self, sequence: Sequence, num_output_tokens: int) -> None:
        """See `SchedulingPolicy.on_output`: without effect."""


SCHEDULING_POLICIES.register("lpm")(LongestPrefix)
