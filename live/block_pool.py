"""Physical block ids for the blocks that `schedulers.kv_cache` only counts, and blocks in host memory.

The ids of free blocks are kept with their entry of the free queue, those of a prefix node in its payload, and those of
a sequence, shared blocks first, in the payload of its `SequenceBlocks`. Blocks that were allocated for decodes without
an owner wait in `unassigned_ids` until a sequence gets them. `HostTier` has the content of the tier that
`schedulers.kv_tiers` keeps the books of.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import cast

import numpy as np
import torch

from live.device import check_memory, to_device
from live.models.decoder import PagedCache
from schedulers.kv_cache import FreeRun, KVCache, PrefixNode, SequenceBlocks
from schedulers.kv_tiers import KVTiers, Load, Store


class BlockPool(KVCache):
    """A KV cache whose blocks have ids, from 0; `unassigned_ids` belong to no sequence yet."""

    def __init__(self, num_blocks: int, block_size: int, blocks_per_node: int = 1, enable_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, blocks_per_node, enable_caching)
        self.unassigned_ids: list[int] = []
        self._ids: dict[FreeRun, list[int]] = {}
        self._leaving: list[int] = []
        for entry in self._free_queue:
            assert isinstance(entry, FreeRun)
            self._ids[entry] = list(range(num_blocks))

    def table(self, blocks: SequenceBlocks) -> list[int]:
        """The block ids of a sequence in the order of its tokens. The list is the pool's own."""
        if blocks.payload is None:
            blocks.payload = []
        return cast(list[int], blocks.payload)

    def assign(self, blocks: SequenceBlocks) -> int:
        """Give a decoding sequence its next block, one of those allocated for this step; returns the id."""
        block = self.unassigned_ids.pop()
        self.table(blocks).append(block)
        return block

    # -- the scheduler's interface -----------------------------------------------------------------------------------

    def attach(self, blocks: SequenceBlocks, nodes: Many[PrefixNode]) -> None:
        super().attach(blocks, nodes)
        table = self.table(blocks)
        for node in nodes:
            table.extend(cast(list[int], node.payload))

    def reclaim(self, blocks: SequenceBlocks, count: int) -> None:
        """See `KVCache.reclaim`: a sequence takes back the blocks that it freed, except where shared blocks now
        replace them.
        """
        run = blocks.freed_run
        if run is None:
            return
        begin = (len(blocks.nodes) - run.num_preceding_nodes) * self.blocks_per_node
        super().reclaim(blocks, count)
        ids = self._ids.pop(run, [])
        self.table(blocks).extend(ids[begin : begin + count])
        del ids[begin : begin + count]
        if ids:
            self._ids[run] = ids

    def allocate(self, blocks: SequenceBlocks, count: int) -> None:
        super().allocate(blocks, count)
        if count:
            self.table(blocks).extend(self.unassigned_ids[-count:])
            del self.unassigned_ids[-count:]

    def allocate_unassigned(self, count: int) -> None:
        """See `KVCache.allocate_unassigned`. The last blocks of a free run go first, so that the others can be
        reclaimed.
        """
        missing = count if count <= self.num_free_blocks else 0  # `super` refuses too many
        for entry in self._free_queue:
            if missing <= 0:
                break
            if isinstance(entry, FreeRun):
                ids = self._ids[entry]
                num_ids = min(missing, len(ids))
                self.unassigned_ids.extend(ids[len(ids) - num_ids :])
                del ids[len(ids) - num_ids :]
                if not ids:
                    del self._ids[entry]
            else:
                ids = cast(list[int], cast(PrefixNode, entry).payload)
                num_ids = len(ids)
                self.unassigned_ids.extend(ids)
            missing -= num_ids
        if missing < 0:  # a node is taken whole
            self._leaving = self.unassigned_ids[missing:]
            del self.unassigned_ids[missing:]
        super().allocate_unassigned(count)

    def cache_blocks(self, blocks: SequenceBlocks, ids: Many[int], tokens: int) -> None:
        before = len(blocks.nodes)
        super().cache_blocks(blocks, ids, tokens)
        size = self.blocks_per_node
        for i in range(before, len(blocks.nodes)):
            blocks.nodes[i].payload = self.table(blocks)[i * size : (i + 1) * size]

    def _merge(self, blocks: SequenceBlocks, node: PrefixNode) -> None:
        table, begin = self.table(blocks), len(blocks.nodes) * self.blocks_per_node
        self._leaving, rest = table[begin : begin + self.blocks_per_node], table[begin + self.blocks_per_node :]
        del table[begin:]
        super()._merge(blocks, node)
        table.extend(rest)

    def free(self, blocks: SequenceBlocks, num_hashed: int = 0, *, preempted: bool = False) -> None:
        private = self.table(blocks)[len(blocks.nodes) * self.blocks_per_node :]
        lacking = blocks.num_private - len(private)  # allocated for it, but its step was never prepared
        if lacking > 0:
            private.extend(self.unassigned_ids[-lacking:])
            del self.unassigned_ids[-lacking:]
        self._leaving = private
        blocks.payload = None
        super().free(blocks, num_hashed, preempted=preempted)
        if self._leaving:  # those that it may take back
            assert blocks.freed_run is not None
            self._ids[blocks.freed_run] = self._leaving
            self._leaving = []

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self._ids = {entry: list(range(self.num_blocks)) for entry in self._free_queue if isinstance(entry, FreeRun)}
        return True

    def _add_blank(self, count: int, first: bool) -> None:
        """See `KVCache._add_blank`: the free run gets the last `count` of the ids that are being freed."""
        super()._add_blank(count, first)
        run = self._free_queue.first if first else self._free_queue.last
        assert isinstance(run, FreeRun)
        self._ids.setdefault(run, []).extend(self._leaving[len(self._leaving) - count :])
        del self._leaving[len(self._leaving) - count :]

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self, owners: Many[SequenceBlocks], unassigned: int = 0) -> None:
        """See `KVCache.check_integrity`: every block is in exactly one place, or an `AssertionError` with numbers."""
        super().check_integrity(owners, unassigned)
        size = self.blocks_per_node
        placed = list(self.unassigned_ids)
        nodes: dict[PrefixNode, None] = {}
        for entry in self._free_queue:
            if isinstance(entry, FreeRun):
                if len(self._ids[entry]) != entry.count:
                    raise AssertionError(f"{entry.count} free blocks have {len(self._ids[entry])} ids")
                placed.extend(self._ids[entry])
            else:
                nodes[cast(PrefixNode, entry)] = None
        for blocks in owners:
            table = self.table(blocks)
            for i, node in enumerate(blocks.nodes):
                if table[i * size : (i + 1) * size] != node.payload:
                    raise AssertionError(f"prefix block {node.key} is {node.payload}, a sequence reads {table}")
                nodes[node] = None
            placed.extend(table[len(blocks.nodes) * size :])
        for node in nodes:
            placed.extend(cast(list[int], node.payload))
        if sorted(placed) != list(range(self.num_blocks)):
            raise AssertionError(
                f"{len(placed)} ids of {len(set(placed))} blocks are placed, there are {self.num_blocks}"
            )


class HostTier:
    """Copies KV blocks of one engine to host memory and back; `BadInput` without the memory.

    On a GPU copies are done in the order of its stream, like the steps that write and read the blocks, without a
    wait of the host.

    `content`: (slots, 2, layers, blocks of a slot, block size, kv_heads, head_dim), keys before values.
    """

    def __init__(self, tiers: KVTiers, cache: PagedCache, pool: BlockPool) -> None:
        (tier,) = tiers.tiers
        layers, _, *block = cache.keys.shape
        shape = (tier.capacity, 2, layers, pool.blocks_per_node, *block)
        size = torch.Size(shape).numel() * cache.keys.element_size()
        check_memory(size, "KV blocks in host memory", "cpu")
        self.content = torch.empty(shape, dtype=cache.keys.dtype, pin_memory=cache.keys.is_cuda)
        self._caches = cache.keys, cache.values
        self._pool = pool

    @torch.inference_mode()
    def store(self, stores: Iterable[Store]) -> None:
        """Copy blocks of the device to their slots, in order."""
        for store in stores:
            ids = self._on_device(cast(list[int], store.payload))
            for part, cache in zip(self.content[store.block.slot], self._caches, strict=True):
                part.copy_(cache.index_select(1, ids), non_blocking=True)
            store.block.ready_at = 0.0

    @torch.inference_mode()
    def load(self, load: Load) -> None:
        """Copy slots to the blocks of the device that a load has."""
        size = self._pool.blocks_per_node
        table = self._pool.table(load.blocks)[len(load.blocks.nodes) * size :]
        for i, (_, block) in enumerate(load.sources):
            ids = self._on_device(table[i * size : (i + 1) * size])
            for part, cache in zip(self.content[block.slot], self._caches, strict=True):
                cache.index_copy_(1, ids, part.to(cache.device, non_blocking=True))

    def _on_device(self, ids: list[int]) -> torch.Tensor:
        return to_device(np.array(ids), self._caches[0].device)
