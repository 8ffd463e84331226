"""Tiers below the device's KV cache: host memory and disk, which keep blocks that the device may lose.

The unit is a node of the prefix trie, named by its `block_hash`. With `write_through` a block is stored in the first
tier as soon as it is computed (vLLM's `OffloadingConnector`, LMCache); with `write_back` when the device evicts it.
Blocks that the first tier evicts go to the second. A waiting sequence whose prefix goes on in a tier gets device
blocks, and waits while the prefix is loaded (vLLM's `WAITING_FOR_REMOTE_KVS`); other sequences may overtake it
meanwhile. Then its blocks are in the prefix cache and it is admitted as usual.

This is bookkeeping. The backend takes what is to be copied (`take_stores`, `take_loads`), says when a stored block can
be read (`TierBlock.ready_at`), and calls `EngineCore.finish_load`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from schedulers.engine_config import KVOffloading, TierConfig
from schedulers.eviction import EVICTION_POLICIES, EvictionPolicy, TierBlock
from schedulers.kv_cache import PATH_HASHES, CacheObserver, KVCache, PrefixNode, SequenceBlocks, block_hash, cached_path
from schedulers.sequence import Sequence

DEVICE: Final = -1
"""The source of a store that comes from the device, in place of the number of a tier."""


class Tier:
    """One tier: blocks by hash, and counters of those loaded from it, stored in it, and lost or moved down."""

    def __init__(self, config: TierConfig) -> None:
        self.name = config.name
        self.capacity = config.capacity
        self.blocks: dict[int, TierBlock] = {}
        self.loaded = self.stored = self.evicted = 0
        self.eviction: EvictionPolicy = EVICTION_POLICIES.select(config.eviction)()
        self._free_slots: list[int] = []
        self._used_slots = 0

    def add(self, block_hash: int, depth: int, loss: float) -> TierBlock:
        """Put a block into the tier, which has room for it."""
        slot = self._free_slots.pop() if self._free_slots else self._used_slots
        self._used_slots = max(self._used_slots, slot + 1)
        block = self.blocks[block_hash] = TierBlock(block_hash, depth, slot)
        self.eviction.add(block, loss)
        self.stored += 1
        return block

    def remove(self, block: TierBlock) -> None:
        del self.blocks[block.block_hash]
        self.eviction.remove(block)
        self._free_slots.append(block.slot)
        self.evicted += 1

    def check_integrity(self) -> None:
        """Check that every block has a slot of its own, and that policy and tier have the same blocks."""
        slots = sorted(block.slot for block in self.blocks.values())
        if sorted([*slots, *self._free_slots]) != list(range(self._used_slots)) or self._used_slots > self.capacity:
            raise AssertionError(
                f"{self.name}: {len(slots)} blocks and {len(self._free_slots)} free slots make {self._used_slots} of "
                f"{self.capacity}"
            )
        if self.eviction.size() != len(self.blocks):
            raise AssertionError(f"{self.name}: {len(self.blocks)} blocks, {self.eviction.size()} may be evicted")
        if self.stored - self.evicted != len(self.blocks):
            raise AssertionError(f"{self.name}: {self.stored} stored, {self.evicted} gone, {len(self.blocks)} left")


class Store:
    """A block to be copied into the tier of a number, from `when` on, seconds.

    `source`: `DEVICE`, or the number of the tier that it comes from, and its `slot` there. `payload`: of the node on
    the device, which belongs to the live backend.
    """

    def __init__(self, tier: int, block: TierBlock, source: int, when: float, payload: object, slot: int) -> None:
        self.tier = tier
        self.block = block
        self.source = source
        self.when = when
        self.payload = payload
        self.slot = slot


class Load:
    """A prefix on its way from tiers to the device, for `sequence`; None once that has been aborted.

    `blocks`: the device blocks: nodes that the device had, then one for each of `sources`, not cached yet. `sources`:
    the tier and the block of each part, in the order of the prompt. `tokens`: those that will then be on the device.
    """

    def __init__(self, sequence: Sequence, sources: list[tuple[int, TierBlock]], tokens: int) -> None:
        self.sequence: Sequence | None = sequence
        self.blocks = SequenceBlocks()
        self.sources = sources
        self.tokens = tokens
        self.ids = sequence.request.prefix_blocks


class KVTiers(CacheObserver):
    """The tiers below the KV cache of one engine, nearest first, and loads under way by the request's id.

    `listeners`: told of blocks that enter or leave the prefix cache as a whole, device and tiers.
    """

    def __init__(self, config: KVOffloading, kv_cache: KVCache) -> None:
        super().__init__()
        self.config = config
        self.tiers = [Tier(tier) for tier in config.tiers]
        self.loads: dict[int, Load] = {}
        self.orphans: list[Load] = []
        self.listeners: list[CacheObserver] = []
        self._kv_cache = kv_cache
        self._write_back = config.write_policy == "write_back"
        self._cost_per_depth = kv_cache.node_tokens / config.attention_tokens
        self._on_device: dict[int, None] = {}
        self._loading: dict[int, None] = {}
        self._cached: list[PrefixNode] = []
        self._stores: list[Store] = []
        self._new_loads: list[Load] = []
        kv_cache.observers.append(self)

    def on_cached(self, node: PrefixNode) -> None:
        self._on_device[node.block_hash] = None
        self._tell(True, node.block_hash)
        if not self._write_back:
            self._cached.append(node)

    def on_evicted(self, node: PrefixNode) -> None:
        del self._on_device[node.block_hash]
        if self._write_back:
            self._store(0, node.block_hash, node.depth, DEVICE, node.payload, 0, self._cost(node.depth))
        if self._tier_of(node.block_hash) < 0:
            self._tell(False, node.block_hash)

    def lookup(self, nodes: Many[PrefixNode], ids: Many[int], tokens: int) -> list[tuple[int, TierBlock]]:
        """Blocks of tiers that continue a path of `nodes` on the device, within the first `tokens` tokens of a prompt.

        Those that are not complete in their tier yet do not count. All blocks of the path count as used.
        """
        blocks: list[tuple[int, TierBlock]] = []
        path = nodes[-1].block_hash if nodes else 0
        for key in ids[len(nodes) : tokens // self._kv_cache.node_tokens]:
            path = block_hash(path, key)
            number = self._tier_of(path)
            if number < 0:
                break
            block = self.tiers[number].blocks[path]
            if block.ready_at > self.now:
                break
            blocks.append((number, block))
        self._touch(nodes, blocks)
        return blocks

    def cached_prefix_tokens(self, ids: tuple[int, ...], tokens: int) -> int:
        """Leading prompt tokens that are on the device, or follow there in tiers; changes nothing."""
        node_tokens = self._kv_cache.node_tokens
        length, hashes = min(tokens // node_tokens, len(ids)), PATH_HASHES.of(ids)
        nodes = cached_path(hashes, length, self._on_device)
        while nodes < length:
            number = self._tier_of(hashes[nodes])
            if number < 0 or self.tiers[number].blocks[hashes[nodes]].ready_at > self.now:
                break
            nodes += 1
        return nodes * node_tokens

    def is_loading(self, sources: Many[tuple[int, TierBlock]]) -> bool:
        """Tell whether one of these blocks is being loaded for another sequence."""
        return bool(self._loading) and any(block.block_hash in self._loading for _, block in sources)

    def begin(self, sequence: Sequence, nodes: Many[PrefixNode], sources: list[tuple[int, TierBlock]]) -> None:
        """Begin to load `sources` for a sequence, into blocks of the device that are free."""
        kv_cache = self._kv_cache
        load = Load(sequence, sources, (len(nodes) + len(sources)) * kv_cache.node_tokens)
        for tier, block in sources:
            block.pins += 1
            self._loading[block.block_hash] = None
            self.tiers[tier].loaded += 1
        kv_cache.attach(load.blocks, nodes)
        kv_cache.allocate(load.blocks, len(sources) * kv_cache.blocks_per_node)
        self.loads[sequence.request.id] = load
        self._new_loads.append(load)

    def finish(self, load: Load) -> None:
        """Put a loaded prefix into the prefix cache, where it is free."""
        for _, block in load.sources:
            block.pins -= 1
            self._loading.pop(block.block_hash, None)
        self._kv_cache.cache_blocks(load.blocks, load.ids, load.tokens)
        self._kv_cache.free(load.blocks)
        for tier, block in reversed(load.sources):
            if tier:  # it has passed through the first tier
                self._store(0, block.block_hash, block.depth, tier, None, block.slot, self._cost(block.depth))
        if load.sequence is not None:
            del self.loads[load.sequence.request.id]
        else:
            self.orphans.remove(load)

    def forget(self, sequence: Sequence) -> bool:
        """A sequence has been aborted: whether a prefix was being loaded for it, which goes on."""
        load = self.loads.pop(sequence.request.id, None)
        if load is None:
            return False
        load.sequence = None
        self.orphans.append(load)
        return True

    def take_stores(self, computed: bool) -> list[Store]:
        """The copies into tiers that have come up since the last call, to be made in this order.

        To be called after a step has ended, with `computed`, since what it has computed can be copied now; and after a
        step has begun and before it runs, since it may overwrite what was evicted.
        """
        if self._cached and computed:
            self._store_cached()
        stores = self._stores
        self._stores = []
        return stores

    def take_loads(self) -> list[Load]:
        """The loads that have begun since the last call, to be made after the stores."""
        loads = self._new_loads
        self._new_loads = []
        return loads

    def check_integrity(self) -> None:
        """Check every tier, and that blocks are pinned once for each load."""
        for tier in self.tiers:
            tier.check_integrity()
        pins = sum(block.pins for tier in self.tiers for block in tier.blocks.values())
        sources = sum(len(load.sources) for load in (*self.loads.values(), *self.orphans))
        if pins != sources:
            raise AssertionError(f"{pins} blocks of tiers are pinned, loads read {sources}")

    def _tier_of(self, block: int) -> int:
        """The number of the nearest tier that has a block; -1 if none has."""
        for number, tier in enumerate(self.tiers):
            if block in tier.blocks:
                return number
        return -1

    def _touch(self, nodes: Many[PrefixNode], blocks: Many[tuple[int, TierBlock]]) -> None:
        """Note that a path is used, its end first, so that it is evicted first."""
        loss = 0.0
        for number, block in reversed(blocks):
            loss += self._cost(block.depth)
            self.tiers[number].eviction.use(block, loss)
        first = self.tiers[0]
        for node in reversed(nodes):
            loss += self._cost(node.depth)
            copy = first.blocks.get(node.block_hash)
            if copy is not None:
                first.eviction.use(copy, loss)

    def _store_cached(self) -> None:
        """Store the blocks that were computed, of each prompt the last first, and count those before them as used.

        So what a tier evicts first is the end of a prompt.
        """
        nodes, first, loss = self._cached, self.tiers[0], 0.0
        for i in range(len(nodes) - 1, -1, -1):
            node = nodes[i]
            loss += self._cost(node.depth)
            self._store(0, node.block_hash, node.depth, DEVICE, node.payload, 0, loss)
            if i and nodes[i - 1] is node.parent:
                continue
            before = node.parent
            while before is not None and before.parent is not None:
                loss += self._cost(before.depth)
                block = first.blocks.get(before.block_hash)
                if block is not None:
                    first.eviction.use(block, loss)
                before = before.parent
            loss = 0.0
        nodes.clear()

    def _cost(self, depth: int) -> float:
        """The cost of computing a block again: 1 for the first of a prompt, more with attention to those before."""
        return 1.0 + depth * self._cost_per_depth

    def _store(
        self, number: int, block_hash: int, depth: int, source: int, payload: object, slot: int, loss: float
    ) -> None:
        """Put a block into a tier; what it replaces goes to the next tier."""
        tier = self.tiers[number]
        block = tier.blocks.get(block_hash)
        if block is not None:
            tier.eviction.use(block, loss)
            return
        if len(tier.blocks) >= tier.capacity:
            victim = tier.eviction.victim()
            if victim is None:  # all are being loaded
                return
            if number + 1 < len(self.tiers) and victim.ready_at <= self.now:
                cost = self._cost(victim.depth)
                self._store(number + 1, victim.block_hash, victim.depth, number, None, victim.slot, cost)
            tier.remove(victim)
            if self._tier_of(victim.block_hash) < 0 and victim.block_hash not in self._on_device:
                self._tell(False, victim.block_hash)
        added = tier.add(block_hash, depth, loss)
        if number == 0 and source > 0:
            added.ready_at = self.now  # it has just passed through
        else:
            self._stores.append(Store(number, added, source, self.now, payload, slot))

    def _tell(self, cached: bool, block: int) -> None:
        for listener in self.listeners:
            listener.now = self.now
            listener.publish(cached, block)
