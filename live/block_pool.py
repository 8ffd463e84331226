"""Which physical block is whose: the live plant's side of `schedulers.kv_cache`.

The scheduler counts blocks. Here every count has its ids: those of free blocks by the entry of the free queue that they
stand in, those of a prefix block in its node's payload, those of a sequence, shared ones first, in its holding's.
Blocks that were drawn for decodes without saying for whom wait in `drawn` until somebody is given one.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import cast

from schedulers.kv_cache import Holding, KVCache, Node, Remains


class BlockPool(KVCache):
    """A KV cache whose blocks have numbers, from 0.

    Attributes:
        drawn: ids taken off the free queue and not given to a sequence yet.
    """

    def __init__(self, blocks: int, block_tokens: int, node_blocks: int = 1, caching: bool = True) -> None:
        super().__init__(blocks, block_tokens, node_blocks, caching)
        self.drawn: list[int] = []
        self._ids: dict[Remains, list[int]] = {}
        self._leaving: list[int] = []
        for entry in self._queue:
            assert isinstance(entry, Remains)
            self._ids[entry] = list(range(blocks))

    def table(self, holding: Holding) -> list[int]:
        """The blocks of a sequence in the order of its tokens; the pool's own list."""
        if holding.payload is None:
            holding.payload = []
        return cast(list[int], holding.payload)

    def give(self, holding: Holding) -> int:
        """The next block of a sequence that decodes, out of those drawn for this step."""
        block = self.drawn.pop()
        self.table(holding).append(block)
        return block

    # -- what the scheduler asks for ---------------------------------------------------------------------------------

    def attach(self, holding: Holding, nodes: Many[Node]) -> None:
        """As `KVCache.attach`."""
        super().attach(holding, nodes)
        table = self.table(holding)
        for node in nodes:
            table.extend(cast(list[int], node.payload))

    def reclaim(self, holding: Holding, count: int) -> None:
        """As `KVCache.reclaim`: what it left behind is its own again, but for what shared blocks now stand in for."""
        remains = holding.remains
        if remains is None:
            return
        begin = (len(holding.nodes) - remains.follows) * self.node_blocks
        super().reclaim(holding, count)
        ids = self._ids.pop(remains, [])
        self.table(holding).extend(ids[begin : begin + count])
        del ids[begin : begin + count]
        if ids:
            self._ids[remains] = ids

    def take(self, holding: Holding, count: int) -> None:
        """As `KVCache.take`."""
        super().take(holding, count)
        if count:
            self.table(holding).extend(self.drawn[-count:])
            del self.drawn[-count:]

    def draw(self, count: int) -> None:
        """As `KVCache.draw`. Of what a preempted sequence left the last blocks go first: the others still follow on."""
        missing = count if count <= self.free else 0  # too many are refused below
        for entry in self._queue:
            if missing <= 0:
                break
            if isinstance(entry, Remains):
                ids = self._ids[entry]
                going = min(missing, len(ids))
                self.drawn.extend(ids[len(ids) - going :])
                del ids[len(ids) - going :]
                if not ids:
                    del self._ids[entry]
            else:
                ids = cast(list[int], entry.payload)
                going = len(ids)
                self.drawn.extend(ids)
            missing -= going
        super().draw(count)

    def publish(self, holding: Holding, ids: Many[int], tokens: int) -> None:
        """As `KVCache.publish`."""
        before = len(holding.nodes)
        super().publish(holding, ids, tokens)
        size = self.node_blocks
        for i in range(before, len(holding.nodes)):
            holding.nodes[i].payload = self.table(holding)[i * size : (i + 1) * size]

    def release(self, holding: Holding, *, keep: int = 0) -> None:
        """As `KVCache.release`."""
        private = self.table(holding)[len(holding.nodes) * self.node_blocks :]
        lacking = holding.private - len(private)  # drawn for it, and its step was never prepared
        if lacking > 0:
            private.extend(self.drawn[-lacking:])
            del self.drawn[-lacking:]
        kept = private[:keep] if self.caching else []
        self._leaving = private[len(kept) :]
        holding.payload = None
        super().release(holding, keep=keep)
        if kept:
            assert holding.remains is not None
            self._ids[holding.remains] = kept

    def _append(self, count: int) -> None:
        super()._append(count)
        last = next(reversed(self._queue))
        assert isinstance(last, Remains)
        self._ids.setdefault(last, []).extend(self._leaving)

    def _prepend(self, count: int) -> None:
        super()._prepend(count)
        first = next(iter(self._queue))
        assert isinstance(first, Remains)
        self._ids[first] = self.drawn[-count:]
        del self.drawn[-count:]

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self, holdings: Many[Holding], unsettled: int = 0) -> None:
        """As `KVCache.check_integrity`, and every block has one place.

        Raises:
            AssertionError: with the numbers.
        """
        super().check_integrity(holdings, unsettled)
        size = self.node_blocks
        placed = list(self.drawn)
        nodes: dict[Node, None] = {}
        for entry in self._queue:
            if isinstance(entry, Remains):
                if len(self._ids[entry]) != entry.count:
                    raise AssertionError(f"{entry.count} free blocks have {len(self._ids[entry])} ids")
                placed.extend(self._ids[entry])
            else:
                nodes[entry] = None
        for holding in holdings:
            table = self.table(holding)
            for i, node in enumerate(holding.nodes):
                if table[i * size : (i + 1) * size] != node.payload:
                    raise AssertionError(f"prefix block {node.key} is {node.payload}, a sequence reads {table}")
                nodes[node] = None
            placed.extend(table[len(holding.nodes) * size :])
        for node in nodes:
            placed.extend(cast(list[int], node.payload))
        if sorted(placed) != list(range(self.blocks)):
            raise AssertionError(f"{len(placed)} ids of {len(set(placed))} blocks are placed, there are {self.blocks}")
