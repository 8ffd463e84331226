"""Eviction: entries in the order of their latest use, and which block of a full tier below the device gives way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from math import inf

from mypy_extensions import mypyc_attr

from workloads.registry import Registry


class Linked:
    """An entry of a `RecencyList`, one at a time; a subclass sets both neighbours to None at first."""

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Linked | None = None
        self.after: Linked | None = None


class RecencyList:
    """Entries, the least recently used first.

    Attributes:
        first, last: None where the list is empty. size: the number of entries.
    """

    __slots__ = ("first", "last", "size")

    def __init__(self) -> None:
        self.first: Linked | None = None
        self.last: Linked | None = None
        self.size = 0

    def append(self, entry: Linked) -> None:
        """Put an entry that is in no list behind all others."""
        last = self.last
        entry.before = last
        if last is None:
            self.first = entry
        else:
            last.after = entry
        self.last = entry
        self.size += 1

    def prepend(self, entry: Linked) -> None:
        """Put an entry that is in no list before all others."""
        first = self.first
        entry.after = first
        if first is None:
            self.last = entry
        else:
            first.before = entry
        self.first = entry
        self.size += 1

    def remove(self, entry: Linked) -> None:
        """Take an entry out."""
        before, after = entry.before, entry.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self.last = before
        else:
            after.before = before
        entry.before = entry.after = None
        self.size -= 1

    def move_to_end(self, entry: Linked) -> None:
        """Put an entry of this list behind all others."""
        if entry.after is not None:
            self.remove(entry)
            self.append(entry)

    def __iter__(self) -> Iterator[Linked]:
        """From the least recently used on. The list may not change meanwhile."""
        entry = self.first
        while entry is not None:
            yield entry
            entry = entry.after


class TierBlock(Linked):
    """The content of one prefix node in a tier.

    Attributes:
        block_hash, depth: those of the node. slot: its place in the tier, from 0.
        ready_at: when its copy is complete, seconds; infinity while that is not known. pins: loads that read it.
        uses, priority: for eviction policies.
    """

    __slots__ = ("block_hash", "depth", "pins", "priority", "ready_at", "slot", "uses")

    def __init__(self, block_hash: int, depth: int, slot: int) -> None:
        self.before = self.after = None
        self.block_hash = block_hash
        self.depth = depth
        self.slot = slot
        self.ready_at = inf
        self.pins = self.uses = 0
        self.priority = 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionPolicy:
    """Orders the blocks of one tier. A plug-in's is a subclass."""

    def add(self, block: TierBlock, loss: float) -> None:
        """A block has been stored."""
        raise NotImplementedError

    def use(self, block: TierBlock, loss: float) -> None:
        """A prompt has used a block.

        `loss`: cost of computing it again and the blocks of that prompt after it, which are of no use without it. The
        first block of a prompt costs 1.
        """
        raise NotImplementedError

    def remove(self, block: TierBlock) -> None:
        raise NotImplementedError

    def victim(self) -> TierBlock | None:
        """The block that gives way, one without pins; None if all have some. It stays until `remove`."""
        raise NotImplementedError

    def size(self) -> int:
        """The number of blocks."""
        raise NotImplementedError


class LeastRecentlyUsed(EvictionPolicy):
    """The block that was stored or used longest ago."""

    def __init__(self) -> None:
        self._order = RecencyList()

    def add(self, block: TierBlock, loss: float) -> None:
        self._order.append(block)

    def use(self, block: TierBlock, loss: float) -> None:
        self._order.move_to_end(block)

    def remove(self, block: TierBlock) -> None:
        self._order.remove(block)

    def victim(self) -> TierBlock | None:
        block = self._order.first
        while block is not None:
            assert isinstance(block, TierBlock)
            if not block.pins:
                return block
            block = block.after
        return None

    def size(self) -> int:
        return self._order.size


class CostAware(EvictionPolicy):
    """The block whose loss costs least, by uses and age (GreedyDual-Size-Frequency, Cherkasova 1998; equal sizes).

    A block's priority is the clock plus uses times loss, both as of its latest use. The clock is the priority of the
    latest victim, so that blocks that are not used any more fall behind.
    """

    def __init__(self) -> None:
        self._clock = 0.0
        self._number = 0
        self._blocks: dict[TierBlock, int] = {}  # the number of the entry that counts
        self._heap: list[tuple[float, int, TierBlock]] = []

    def add(self, block: TierBlock, loss: float) -> None:
        self.use(block, loss)

    def use(self, block: TierBlock, loss: float) -> None:
        block.uses += 1
        block.priority = self._clock + block.uses * loss
        self._push(block)

    def remove(self, block: TierBlock) -> None:
        del self._blocks[block]

    def victim(self) -> TierBlock | None:
        heap, pinned, victim = self._heap, list[TierBlock](), None
        while heap and victim is None:
            priority, number, block = heappop(heap)
            if self._blocks.get(block, 0) != number:
                continue
            if block.pins:
                pinned.append(block)
                continue
            victim = block
            self._clock = priority
        for entry in pinned:
            self._push(entry)
        if victim is not None:
            self._push(victim)
        return victim

    def size(self) -> int:
        return len(self._blocks)

    def _push(self, block: TierBlock) -> None:
        self._number += 1
        self._blocks[block] = self._number
        heappush(self._heap, (block.priority, self._number, block))
        if len(self._heap) > 4 * len(self._blocks) + 64:
            self._heap = [entry for entry in self._heap if self._blocks.get(entry[2], 0) == entry[1]]
            heapify(self._heap)


EVICTION_POLICIES: Registry[Callable[[], EvictionPolicy]] = Registry(lru=LeastRecentlyUsed, cost_aware=CostAware)
"""Makes the eviction policy of a tier."""
