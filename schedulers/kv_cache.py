"""KV memory in blocks: how many each sequence holds, which prompt prefixes are shared, and what is evicted first.

Blocks are counted, not numbered; the live backend gives them physical ids. A block is either held by sequences (a
prefix block by any number of them) or free. Free blocks stand in one queue, least recently used first, and most of them
still have content: a node of the prefix trie, or the blocks of a preempted sequence. A sequence that needs this content
takes such blocks back from the middle of the queue. Allocating from the head of the queue evicts the content. vLLM's
block pool works the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from mypy_extensions import mypyc_attr

from schedulers.eviction import Linked, RecencyList


class PrefixNode(Linked):
    """A shareable piece of a prompt: one node of the prefix trie, `blocks_per_node` blocks.

    `ref_count` counts the sequences that hold it; at 0 it stands in the free queue. `payload` belongs to the live
    backend. `block_hash`: stands for the whole path from the root (`block_hash`). `depth`: nodes before it. Both are 0
    in a cache without observers. `copies`: later nodes of the same content, on the one that is found; they share its
    `children`.
    """

    __slots__ = ("block_hash", "children", "copies", "depth", "key", "parent", "payload", "ref_count")

    def __init__(self, key: int, parent: PrefixNode | None) -> None:
        self.before = self.after = None
        self.key = key
        self.parent = parent
        self.block_hash = self.depth = 0
        self.children: dict[int, PrefixNode] = {}
        self.copies: list[PrefixNode] | None = None
        self.ref_count = 0
        self.payload: object = None


def block_hash(parent: int, key: int) -> int:
    """A number for a path of prefix ids: that of the path without its last id (0 at the root), and the last id.

    As vLLM's block hashes, equal in every process. Two of a million paths are equal with a probability of 3e-8.
    """
    return hash((parent, key))


class PathHashes:
    """The `block_hash` of each node along prefix ids. Those of the latest ids are kept: a router asks many caches."""

    def __init__(self) -> None:
        self._latest: tuple[tuple[int, ...], list[int]] = ((), [])  # ids and their hashes, replaced at once

    def of(self, ids: tuple[int, ...]) -> list[int]:
        """One hash an id."""
        latest, hashes = self._latest
        if ids is not latest:
            path, hashes = 0, list[int]()
            for key in ids:
                path = block_hash(path, key)
                hashes.append(path)
            self._latest = ids, hashes
        return hashes


PATH_HASHES: Final = PathHashes()


def cached_path(hashes: list[int], length: int, cached: dict[int, None]) -> int:
    """Nodes among the first `length` of a path that are `cached`: those before a node that is are cached, too."""
    if not length or hashes[0] not in cached:
        return 0
    low, high = 1, length
    middle = length  # most paths are cached as a whole or not at all
    while low < high:
        if hashes[middle - 1] in cached:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


@mypyc_attr(allow_interpreted_subclasses=True)
class CacheObserver:
    """Is told what a prefix cache keeps and drops, as it does.

    Attributes:
        now: the time at which it happens, seconds; the owner of the cache sets it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def on_cached(self, node: PrefixNode) -> None:
        """A node has become part of the prefix cache. Its content is there when the step of this instant has run."""
        self.publish(True, node.block_hash)

    def on_evicted(self, node: PrefixNode) -> None:
        """A node is no longer in the prefix cache. Its content is there until the next step begins."""
        self.publish(False, node.block_hash)

    def publish(self, cached: bool, block: int) -> None:
        """The block with this `block_hash` was cached or evicted."""


class FreeRun(Linked):
    """Free blocks outside the trie: blank ones, or the first `count` private blocks of a preempted sequence.

    `num_preceding_nodes`: prefix nodes of that sequence before the run; -1 for blank blocks.
    """

    __slots__ = ("count", "num_preceding_nodes")

    def __init__(self, count: int, num_preceding_nodes: int = -1) -> None:
        self.before = self.after = None
        self.count = count
        self.num_preceding_nodes = num_preceding_nodes


class SequenceBlocks:
    """The blocks of one sequence: `nodes` from the root of the trie on, then `num_private` blocks of its own.

    `freed_run`: the private blocks that it lost when it was preempted, as far as they are not evicted. `payload`
    belongs to the live backend.
    """

    __slots__ = ("freed_run", "nodes", "num_private", "payload")

    def __init__(self) -> None:
        self.nodes: list[PrefixNode] = []
        self.num_private = 0
        self.freed_run: FreeRun | None = None
        self.payload: object = None


@mypyc_attr(allow_interpreted_subclasses=True)  # the live backend's numbers its blocks
class KVCache:
    """A pool of `num_blocks` blocks of `block_size` tokens; `blocks_per_node` blocks make one id of a prefix.

    Raises ValueError for a size below 1.

    Attributes:
        observers: told of every node that is cached or evicted. To be set before the first is.
        reuse_unhashed_first: whether freed blocks that no prompt can find are allocated before all others, as in vLLM
            since 0.27; before, after those that were freed earlier.
        merges_equal: whether a sequence whose blocks equal cached ones gives up its own for these, as in SGLang's radix
            cache; else its blocks become copies.
    """

    def __init__(self, num_blocks: int, block_size: int, blocks_per_node: int = 1, enable_caching: bool = True) -> None:
        if min(num_blocks, block_size, blocks_per_node) < 1:
            raise ValueError(f"expected sizes of at least 1, found {num_blocks}, {block_size} and {blocks_per_node}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.blocks_per_node = blocks_per_node
        self.node_tokens = block_size * blocks_per_node
        self.enable_caching = enable_caching
        self.num_free_blocks = num_blocks
        self.root = PrefixNode(-1, None)
        self.observers: list[CacheObserver] = []
        self.reuse_unhashed_first = True
        self.merges_equal = False
        self._free_queue = RecencyList()  # of prefix nodes and free runs
        self._free_queue.append(FreeRun(num_blocks))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill or begin."""
        return -(-tokens // self.block_size)

    def num_blocks_of(self, blocks: SequenceBlocks) -> int:
        """Blocks that a sequence holds, shared ones included."""
        return len(blocks.nodes) * self.blocks_per_node + blocks.num_private

    def num_full_private(self, blocks: SequenceBlocks, tokens: int) -> int:
        """Private blocks of a sequence that its first `tokens` tokens fill."""
        return tokens // self.block_size - len(blocks.nodes) * self.blocks_per_node

    def match_prefix(self, ids: Many[int], tokens: int) -> list[PrefixNode]:
        """The longest cached path along `ids` that lies within the first `tokens` tokens."""
        path: list[PrefixNode] = []
        if not self.enable_caching:
            return path
        children = self.root.children
        for key in ids[: tokens // self.node_tokens]:
            node = children.get(key)
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def free_blocks_needed(self, nodes: Many[PrefixNode], new_blocks: int) -> int:
        """Free blocks that attaching `nodes` and then allocating `new_blocks` blocks uses up."""
        return sum(self.blocks_per_node for node in nodes if not node.ref_count) + new_blocks

    def attach(self, blocks: SequenceBlocks, nodes: Many[PrefixNode]) -> None:
        """Let a sequence share `nodes`, which continue the path of the nodes that it holds already."""
        for node in nodes:
            if not node.ref_count:
                self._free_queue.remove(node)
                self.num_free_blocks -= self.blocks_per_node
            node.ref_count += 1
            blocks.nodes.append(node)

    def num_reclaimable(self, blocks: SequenceBlocks, num_nodes: int, max_blocks: int) -> int:
        """Blocks, at most `max_blocks`, that a preempted sequence can take back after its first `num_nodes` nodes.

        Nodes that other sequences have cached meanwhile replace the first of its own blocks.
        """
        run = blocks.freed_run
        if run is None or run.num_preceding_nodes > num_nodes:
            return 0
        replaced = (num_nodes - run.num_preceding_nodes) * self.blocks_per_node
        return max(min(run.count - replaced, max_blocks), 0)

    def reclaim(self, blocks: SequenceBlocks, count: int) -> None:
        """Take back `count` blocks of a preempted sequence. The rest of its free run stays free and becomes blank."""
        run = blocks.freed_run
        blocks.freed_run = None
        if run is None or not run.count:
            return
        run.count -= count
        run.num_preceding_nodes = -1
        if not run.count:
            self._free_queue.remove(run)
        self.num_free_blocks -= count
        blocks.num_private += count

    def allocate(self, blocks: SequenceBlocks, count: int) -> None:
        """Give a sequence `count` private blocks; that many must be free."""
        blocks.num_private += count
        self.allocate_unassigned(count)

    def allocate_unassigned(self, count: int) -> None:
        """Take `count` blocks off the free queue without naming their owner (decodes are assigned theirs later)."""
        if not count:
            return
        if count > self.num_free_blocks:
            raise AssertionError(f"{count} blocks wanted, {self.num_free_blocks} are free")
        self.num_free_blocks -= count
        queue = self._free_queue
        while count > 0:
            entry = queue.first
            if isinstance(entry, FreeRun):
                if entry.count > count:
                    entry.count -= count
                    return
                count -= entry.count
                entry.count = 0
                queue.remove(entry)
            else:
                assert isinstance(entry, PrefixNode)
                count -= self._evict(entry)
        if count < 0:  # a node is evicted whole
            self._add_blank(-count, first=True)

    def cache_blocks(self, blocks: SequenceBlocks, ids: Many[int], tokens: int) -> None:
        """Put the blocks of the first `tokens` prompt tokens into the prefix trie; they stop being private.

        A block whose content another sequence has cached meanwhile becomes a copy, found when that one is evicted.
        """
        if not (self.enable_caching and ids):
            return
        nodes = blocks.nodes
        parent = nodes[-1] if nodes else self.root
        for key in ids[len(nodes) : tokens // self.node_tokens]:
            if blocks.num_private < self.blocks_per_node:
                return
            first = parent.children.get(key)
            if first is not None and self.merges_equal:
                self._merge(blocks, first)
                parent = first
                continue
            node = PrefixNode(key, parent)
            node.ref_count = 1
            blocks.num_private -= self.blocks_per_node
            nodes.append(node)
            if self.observers:
                node.block_hash = block_hash(parent.block_hash, key)
                node.depth = len(nodes) - 1
            if first is not None:
                node.children = first.children
                if first.copies is None:
                    first.copies = []
                first.copies.append(node)
            else:
                parent.children[key] = node
                for observer in self.observers:
                    observer.on_cached(node)
            parent = node

    def _merge(self, blocks: SequenceBlocks, node: PrefixNode) -> None:
        """Let a sequence share `node` in place of its next blocks, which become free."""
        blocks.num_private -= self.blocks_per_node
        self.attach(blocks, (node,))
        self._add_blank(self.blocks_per_node, self.reuse_unhashed_first)
        self.num_free_blocks += self.blocks_per_node

    def free(self, blocks: SequenceBlocks, num_hashed: int = 0, *, preempted: bool = False) -> None:
        """Free all blocks of a sequence, its last blocks first.

        `num_hashed`: its first private blocks that are full, whose content vLLM would find again; they are evicted in
        the order in which they were freed. A `preempted` sequence may take them back.
        """
        if blocks.num_private:
            num_hashed = max(min(num_hashed, blocks.num_private), 0) if self.enable_caching else 0
            if num_hashed < blocks.num_private:
                self._add_blank(blocks.num_private - num_hashed, self.reuse_unhashed_first)
            if num_hashed and preempted:
                blocks.freed_run = FreeRun(num_hashed, len(blocks.nodes))
                self._free_queue.append(blocks.freed_run)
            elif num_hashed:
                self._add_blank(num_hashed, first=False)
            self.num_free_blocks += blocks.num_private
            blocks.num_private = 0
        for node in reversed(blocks.nodes):
            node.ref_count -= 1
            if not node.ref_count:
                self._free_queue.append(node)
                self.num_free_blocks += self.blocks_per_node
        blocks.nodes.clear()

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached. Whether it was done: only if every block is free, as in vLLM."""
        if self.num_free_blocks < self.num_blocks:
            return False
        for entry in self._free_queue:
            if isinstance(entry, FreeRun):
                entry.count = 0
            else:
                assert isinstance(entry, PrefixNode)
                if self._is_found(entry):
                    for observer in self.observers:
                        observer.on_evicted(entry)
        self.root.children.clear()
        self._free_queue = RecencyList()
        self._free_queue.append(FreeRun(self.num_blocks))
        return True

    def _is_found(self, node: PrefixNode) -> bool:
        assert node.parent is not None
        return node.parent.children.get(node.key) is node

    def _add_blank(self, count: int, first: bool) -> None:
        """Put `count` blank blocks at the head of the free queue, or else at its end."""
        queue = self._free_queue
        run = queue.first if first else queue.last
        if isinstance(run, FreeRun) and run.num_preceding_nodes < 0:
            run.count += count
        elif first:
            queue.prepend(FreeRun(count))
        else:
            queue.append(FreeRun(count))

    def _evict(self, node: PrefixNode) -> int:
        """Drop a free node from the trie; returns the number of its blocks."""
        assert node.parent is not None
        siblings, copies = node.parent.children, node.copies
        first = siblings[node.key]
        if first is not node:
            assert first.copies is not None
            first.copies.remove(node)
        elif copies:
            heir = copies.pop(0)
            heir.copies = copies
            siblings[node.key] = heir
        else:
            if node.children:
                raise AssertionError(
                    f"prefix block {node.key} is the oldest free one, but {len(node.children)} follow it"
                )
            for observer in self.observers:
                observer.on_evicted(node)
            del siblings[node.key]
        self._free_queue.remove(node)
        return self.blocks_per_node

    def check_integrity(self, owners: Many[SequenceBlocks], unassigned: int = 0) -> None:
        """Raise AssertionError unless every block is free or held, once, and every node counts its holders.

        `unassigned`: blocks allocated to decodes that no `SequenceBlocks` counts yet.
        """
        queued = sum(entry.count if isinstance(entry, FreeRun) else self.blocks_per_node for entry in self._free_queue)
        if queued != self.num_free_blocks:
            raise AssertionError(f"{queued} blocks stand in the free queue, {self.num_free_blocks} are counted free")
        counts: dict[PrefixNode, int] = {}
        for blocks in owners:
            for node in blocks.nodes:
                counts[node] = counts.get(node, 0) + 1
        for node, count in counts.items():
            if node.ref_count != count:
                raise AssertionError(f"prefix block {node.key}: {node.ref_count} references, {count} holders")
        private = sum(blocks.num_private for blocks in owners)
        in_use, free = private + len(counts) * self.blocks_per_node + unassigned, self.num_free_blocks
        if in_use + free != self.num_blocks:
            raise AssertionError(f"{in_use} blocks held and {free} free make {in_use + free} of {self.num_blocks}")
