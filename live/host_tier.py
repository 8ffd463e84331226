"""KV blocks in host memory: the content of the tier that `schedulers.kv_tiers` keeps the books of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from live.block_pool import BlockPool
from live.memory import check_memory
from live.models.decoder import PagedCache
from schedulers.kv_tiers import KVTiers, Load, Store


class HostTier:
    """Copies KV blocks of one engine to host memory and back, complete on return; `BadInput` without the memory.

    `content`: (slots, 2, layers, blocks of a slot, block size, kv_heads, head_dim), keys before values.
    """

    def __init__(self, tiers: KVTiers, cache: PagedCache, pool: BlockPool) -> None:
        (tier,) = tiers.tiers
        layers, _, *block = cache.keys.shape
        shape = (tier.capacity, 2, layers, pool.blocks_per_node, *block)
        size = torch.Size(shape).numel() * cache.keys.element_size()
        check_memory(size, "KV blocks in host memory", "cpu")
        self.content = torch.empty(shape, dtype=cache.keys.dtype, pin_memory=cache.keys.is_cuda)
        self._cache = cache
        self._pool = pool

    @torch.inference_mode()
    def store(self, stores: Iterable[Store]) -> None:
        """Copy blocks of the device to their slots, in order."""
        keys, values = self._cache.keys, self._cache.values
        for store in stores:
            ids = cast(list[int], store.payload)
            slot = self.content[store.block.slot]
            slot[0].copy_(keys[:, ids])
            slot[1].copy_(values[:, ids])
            store.block.ready_at = 0.0

    @torch.inference_mode()
    def load(self, load: Load) -> None:
        """Copy slots to the blocks of the device that a load has."""
        keys, values, size = self._cache.keys, self._cache.values, self._pool.blocks_per_node
        table = self._pool.table(load.blocks)[len(load.blocks.nodes) * size :]
        for i, (_, block) in enumerate(load.sources):
            ids, slot = table[i * size : (i + 1) * size], self.content[block.slot]
            keys[:, ids] = slot[0].to(keys.device)
            values[:, ids] = slot[1].to(values.device)
