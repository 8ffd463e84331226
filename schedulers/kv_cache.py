"""KV memory in blocks: who holds how many, which prompt prefixes can be shared, and what is forgotten first.

Blocks are counted, not named: physical ids are the live plant's affair. A block is either held by sequences (a prefix
block by any number of them) or free. Free blocks stand in one queue, least recently used first, and most of them still
remember what was computed in them: a node of the prefix trie, or the remains of a preempted sequence. They can be taken
back from the middle of the queue by whoever needs just that content, and are forgotten when they are taken from its
head for something else. This is how vLLM's block pool behaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many


class Node:
    """One shareable prompt block: a node of the prefix trie.

    `references` counts the sequences that hold it; at 0 it stands in the free queue. `payload` is the live plant's.
    """

    __slots__ = ("children", "key", "parent", "payload", "references")

    def __init__(self, key: int, parent: Node | None) -> None:
        self.key, self.parent = key, parent
        self.children: dict[int, Node] = {}
        self.references = 0
        self.payload: object = None


class Remains:
    """Free blocks without a name in the trie: nobody's, or the leading `count` that are left of a preempted sequence.

    `follows`: how many trie nodes of that sequence came before them; -1 where they are nobody's.
    """

    __slots__ = ("count", "follows")

    def __init__(self, count: int, follows: int = -1) -> None:
        self.count, self.follows = count, follows


class Holding:
    """The blocks of one sequence: `nodes` from the root of the trie on, then `private` ones.

    `remains`: what it held privately when it was preempted, as far as nobody has taken it since. `payload` is the live
    plant's.
    """

    __slots__ = ("nodes", "payload", "private", "remains")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.private = 0
        self.remains: Remains | None = None
        self.payload: object = None


class KVCache:
    """A pool of `blocks` blocks of `block_tokens` tokens; `node_blocks` blocks make one id of a request's prefix.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, blocks: int, block_tokens: int, node_blocks: int = 1, caching: bool = True) -> None:
        if min(blocks, block_tokens, node_blocks) < 1:
            raise ValueError(f"expected sizes of at least 1, found {blocks}, {block_tokens} and {node_blocks}")
        self.blocks, self.block_tokens, self.node_blocks = blocks, block_tokens, node_blocks
        self.caching = caching
        self.free = blocks
        self.root = Node(-1, None)
        self._queue: OrderedDict[Node | Remains, None] = OrderedDict()
        self._queue[Remains(blocks)] = None

    @property
    def node_tokens(self) -> int:
        """Prompt tokens of one trie node."""
        return self.block_tokens * self.node_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill or begin."""
        return -(-tokens // self.block_tokens)

    def held(self, holding: Holding) -> int:
        """Blocks that a sequence holds, shared ones included."""
        return len(holding.nodes) * self.node_blocks + holding.private

    # -- matching ----------------------------------------------------------------------------------------------------

    def match(self, ids: Many[int], tokens: int) -> list[Node]:
        """The longest cached path along `ids`, as far as it lies within `tokens` tokens."""
        found: list[Node] = []
        if not self.caching:
            return found
        node: Node | None = self.root
        for key in ids[: tokens // self.node_tokens]:
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            found.append(node)
        return found

    def cost(self, nodes: Many[Node], more: int) -> int:
        """Free blocks that attaching `nodes` and then taking `more` blocks would use up."""
        return sum(self.node_blocks for node in nodes if not node.references) + more

    def attach(self, holding: Holding, nodes: Many[Node]) -> None:
        """Let a sequence share `nodes`, which follow on the nodes that it holds already."""
        for node in nodes:
            if not node.references:
                del self._queue[node]
                self.free -= self.node_blocks
            node.references += 1
            holding.nodes.append(node)

    def remaining(self, holding: Holding, follows: int, most: int) -> int:
        """How many blocks, at most so many, are left of a preempted sequence's own that follow on so many nodes.

        Nodes that others have published meanwhile stand in for the first of its own.
        """
        remains = holding.remains
        if remains is None or remains.follows > follows:
            return 0
        return max(min(remains.count - (follows - remains.follows) * self.node_blocks, most), 0)

    def reclaim(self, holding: Holding, count: int) -> None:
        """Take back `count` blocks that a preempted sequence left behind; the others stay where they are, nobody's."""
        remains, holding.remains = holding.remains, None
        if remains is None or not remains.count:
            return
        remains.count -= count
        remains.follows = -1
        if not remains.count:
            del self._queue[remains]
        self.free -= count
        holding.private += count

    # -- taking and giving back --------------------------------------------------------------------------------------

    def take(self, holding: Holding, count: int) -> None:
        """Give a sequence `count` private blocks; there must be that many free ones."""
        holding.private += count
        self.draw(count)

    def draw(self, count: int) -> None:
        """Take `count` blocks off the free queue without saying for whom (decoding cohorts settle later)."""
        if not count:
            return
        if count > self.free:
            raise AssertionError(f"{count} blocks wanted, {self.free} are free")
        self.free -= count
        queue = self._queue
        while count > 0:
            entry = next(iter(queue))
            if isinstance(entry, Remains):
                if entry.count > count:
                    entry.count -= count
                    return
                count -= entry.count
                entry.count = 0
                del queue[entry]
            else:
                count -= self._forget(entry)
        if count < 0:  # a node is forgotten whole
            self._prepend(-count)

    def publish(self, holding: Holding, ids: Many[int], tokens: int) -> None:
        """Make the prompt blocks that lie within the first `tokens` tokens findable, in exchange for private blocks.

        A block that somebody else has published meanwhile stays private, and so do all that follow.
        """
        if not (self.caching and ids):
            return
        nodes = holding.nodes
        parent = nodes[-1] if nodes else self.root
        for key in ids[len(nodes) : tokens // self.node_tokens]:
            if holding.private < self.node_blocks or key in parent.children:
                return
            node = parent.children[key] = Node(key, parent)
            node.references = 1
            holding.private -= self.node_blocks
            nodes.append(node)
            parent = node

    def release(self, holding: Holding, *, keep: int = 0) -> None:
        """Free everything a sequence holds, its last blocks first.

        `keep`: how many of its private blocks are full and will be wanted back.
        """
        if holding.private:
            if not self.caching:
                keep = 0
            if holding.private > keep:
                self._append(holding.private - keep)
            if keep:
                holding.remains = Remains(keep, len(holding.nodes))
                self._queue[holding.remains] = None
            self.free += holding.private
            holding.private = 0
        for node in reversed(holding.nodes):
            node.references -= 1
            if not node.references:
                self._queue[node] = None
                self.free += self.node_blocks
        holding.nodes.clear()

    def _append(self, count: int) -> None:
        """`count` nameless blocks to the end of the queue."""
        last = next(reversed(self._queue), None)
        if isinstance(last, Remains) and last.follows < 0:
            last.count += count
        else:
            self._queue[Remains(count)] = None

    def _prepend(self, count: int) -> None:
        entry = Remains(count)
        self._queue[entry] = None
        self._queue.move_to_end(entry, last=False)

    def _forget(self, node: Node) -> int:
        """Drop a free node from the trie; the blocks that it occupied."""
        if node.children:
            raise AssertionError(f"prefix block {node.key} is the oldest free one, but {len(node.children)} follow it")
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._queue[node]
        return self.node_blocks

    # -- integrity ---------------------------------------------------------------------------------------------------

    def check_integrity(self, holdings: Many[Holding], unsettled: int = 0) -> None:
        """Every block is free or held, once; every node counts its holders.

        `unsettled`: blocks drawn for decoding cohorts that no holding shows yet.

        Raises:
            AssertionError: with the numbers.
        """
        queued = sum(entry.count if isinstance(entry, Remains) else self.node_blocks for entry in self._queue)
        if queued != self.free:
            raise AssertionError(f"{queued} blocks stand in the free queue, {self.free} are counted free")
        counts: dict[Node, int] = {}
        for holding in holdings:
            for node in holding.nodes:
                counts[node] = counts.get(node, 0) + 1
        for node, count in counts.items():
            if node.references != count:
                raise AssertionError(f"prefix block {node.key}: {node.references} references, {count} holders")
        private = sum(holding.private for holding in holdings)
        held = private + len(counts) * self.node_blocks + unsettled
        if held + self.free != self.blocks:
            raise AssertionError(f"{held} blocks held and {self.free} free make {held + self.free} of {self.blocks}")
