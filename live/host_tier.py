"""KV blocks in host memory: the content of the tier that `schedulers.kv_tiers` keeps the books of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np
import torch

from live.async_copy import to_device
from live.block_pool import BlockPool
from live.memory import check_memory
from live.models.decoder import PagedCache
from schedulers.kv_tiers import KVTiers, Load, Store


class HostTier:
    """Copies KV blocks of one engine to host memory and back; `BadInput` without the memory.

    On a GPU copies are done in the order of its stream, like the steps that write and read the blocks: nobody waits.

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
