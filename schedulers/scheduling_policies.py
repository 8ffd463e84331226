"""Scheduling policies: the orders in which waiting sequences are admitted and running ones preempted.

An engine has one `SchedulingPolicy`, which makes its waiting queues. A fixed order needs only a sort key: see
`KeyOrder`. An order that depends on what was scheduled implements the two protocols, as `schedulers.fair_sharing`
does. A `PreemptionPolicy` says which running sequence loses its KV blocks when decodes find none free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from schedulers.kv_cache import PATH_HASHES, KVCache
from schedulers.sequence import DECODING, WAITING, Sequence
from workloads.registry import Registry

SortKey = Callable[[Sequence], tuple[float, ...]]


class WaitingQueue(Protocol):
    """Waiting sequences in the order of a policy."""

    count: int
    """Waiting sequences."""

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that has arrived."""

    def requeue(self, sequence: Sequence) -> None:
        """Add a sequence that was in the queue before: preempted, or popped and not admitted."""

    def peek(self) -> Sequence | None:
        """The next sequence, which stays in the queue; None when the queue is empty."""

    def peek_key(self) -> tuple[float, ...]:
        """The rank of the sequence that `peek` has just returned; the smallest of several queues goes first."""

    def pop(self) -> Sequence:
        """Remove the sequence that `peek` has just returned."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, whose state the caller changes afterwards."""

    # A queue may also have `ahead_of(sequence)`, the number of waiting sequences that it would serve before one that
    # has not been pushed, for admission control; see `KeyQueue`.


class SchedulingPolicy(Protocol):
    """The order of one engine's waiting sequences.

    Attributes:
        follows_service: the order depends on tokens scheduled so far. The engine then calls the two methods below, and
            considers the queues anew in every step in which a sequence waits and could find a slot. Otherwise neither
            is called.
    """

    follows_service: bool

    def make_queue(self) -> WaitingQueue:
        """A queue in this order. An engine with one-shot limits has two."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that `num_tokens` prompt tokens of a sequence are computed by the step being scheduled."""

    def on_output(self, sequence: Sequence, num_output_tokens: int) -> None:
        """Note that a sequence has `num_output_tokens` output tokens in all.

        Called for each decode before a sequence is pushed and before waiting sequences are considered, and when a
        sequence is preempted or ends.
        """


def fcfs(sequence: Sequence) -> tuple[int, int]:
    """First come, first served. A preempted sequence precedes all that were submitted after it, but see its rules."""
    return 0, sequence.queue_index


def priority(sequence: Sequence) -> tuple[float, float, int]:
    """Smallest `priority` value first; earliest arrival first among equals."""
    return sequence.request.priority, sequence.request.arrival, sequence.seq_id


def shortest_prompt(sequence: Sequence) -> tuple[int, int]:
    """Shortest prompt first; first come, first served among equals."""
    return sequence.request.prompt_tokens, sequence.seq_id


def deadline(sequence: Sequence) -> tuple[float, int]:
    """Earliest deadline first: arrival plus the TTFT goal of its class; first come, first served among equals."""
    return sequence.request.deadline, sequence.seq_id


class FixedOrder:
    """An order that does not depend on what was scheduled."""

    follows_service = False

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Without effect."""

    def on_output(self, sequence: Sequence, num_output_tokens: int) -> None:
        """Without effect."""


class KeyOrder(FixedOrder):
    """Smallest sort key first. The key of a sequence must not change."""

    def __init__(self, sort_key: SortKey) -> None:
        self.sort_key = sort_key

    def make_queue(self) -> KeyQueue:
        return KeyQueue(self.sort_key)


class KeyQueue:
    """A heap by sort key. Removed sequences stay in the heap and are skipped.

    Attributes:
        count: waiting sequences.
    """

    def __init__(self, sort_key: SortKey) -> None:
        self.sort_key = sort_key
        self.count = 0
        self._heap: list[tuple[tuple[float, ...], Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        self.count += 1
        sort_key = self.sort_key  # Python 3.11 calls a function held by an instance attribute slowly
        heappush(self._heap, (sort_key(sequence), sequence))

    def requeue(self, sequence: Sequence) -> None:
        """See `WaitingQueue.requeue`: its key has not changed."""
        self.push(sequence)

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].state != WAITING:
            heappop(heap)
        return heap[0][1] if heap else None

    def peek_key(self) -> tuple[float, ...]:
        return self._heap[0][0]

    def pop(self) -> Sequence:
        self.count -= 1
        return heappop(self._heap)[1]

    def ahead_of(self, sequence: Sequence) -> int:
        """The number of waiting sequences that would be served before one that has not been pushed."""
        if self.sort_key is fcfs:
            return self.count
        key = self.sort_key(sequence)
        return sum(1 for entry_key, sequence in self._heap if entry_key < key and sequence.state == WAITING)

    def remove(self, sequence: Sequence) -> None:
        self.count -= 1
        if len(self._heap) > 2 * self.count + 64:  # removed sequences must not pile up
            self._heap = [entry for entry in self._heap if entry[1].state == WAITING and entry[1] is not sequence]
            heapify(self._heap)

    def sequences(self) -> Iterable[Sequence]:
        """All waiting sequences, in no particular order."""
        return [sequence for _, sequence in self._heap if sequence.state == WAITING]


PreemptionPolicy = Callable[[Iterable[Sequence]], list[Sequence]]
"""Orders running sequences, given in the order of their admission. The last of the result is preempted first."""


def newest(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the newest admission first."""
    return list(running)


def lowest_priority(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the largest `priority` value first, and the latest arrival among equals."""
    return sorted(running, key=priority)


def fewest_outputs(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the decode with the fewest output tokens first, and the longest prompt among equals.

    As SGLang retracts decodes (0.5.9 `ScheduleBatch.retract_decode`). Prompts under way go last.
    """

    def outputs_and_prompt(sequence: Sequence) -> tuple[bool, int, int]:
        """Sorts decodes by what they have computed: all of them got a token in each step since they joined."""
        if sequence.state != DECODING:
            return False, 0, 0
        return True, sequence.joined_step - sequence.num_output_tokens, sequence.request.prompt_tokens

    return sorted(running, key=outputs_and_prompt)


PREEMPTION_POLICIES: Registry[PreemptionPolicy] = Registry(
    newest=newest, lowest_priority=lowest_priority, fewest_outputs=fewest_outputs
)


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


class LongestPrefix(FixedOrder):
    """Longest prefix first: waiting sequences in the order of what the prefix cache has of their prompts.

    SGLang's `schedule_policy: lpm` (0.5.9 `managers/schedule_policy.py`). The order is found anew whenever sequences
    are considered. Equal ones keep the order that they had. Of sequences that find little in the cache and begin alike,
    all but one go last, so that the first computes their prefix for all. With a long queue, nothing is reordered.
    """

    def make_queue(self) -> PrefixQueue:
        return PrefixQueue()


SCHEDULING_POLICIES: Registry[Callable[..., SchedulingPolicy]] = Registry(
    fcfs=lambda: KeyOrder(fcfs),
    priority=lambda: KeyOrder(priority),
    shortest_prompt=lambda: KeyOrder(shortest_prompt),
    deadline=lambda: KeyOrder(deadline),
    lpm=LongestPrefix,
)
"""Makes the policy of one engine, from parameters that a configuration gives it. `schedulers.fair_sharing` adds one."""
