"""Views of a router: the loads of engines, and their prefix caches by the events that it has received.

An engine publishes an event for each block that enters or leaves its prefix cache, as vLLM does (`KVEventsConfig`) and
NVIDIA Dynamo's and llm-d's routers read. Events take time to come, so a router's view is stale: it may expect a prefix
that was evicted, or not know one that has just been computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Final

from schedulers.kv_cache import PATH_HASHES, CacheObserver
from workloads.request import Request

_NO_ENGINE: Final = 1 << 62
"""More than any load: fills the tree up to a power of two."""


class LoadTree:
    """The loads of n engines by position. Setting one and finding the least take O(log n).

    A complete binary tree in a list: the children of node i are nodes 2i and 2i + 1, each node holds the smaller of
    its children, and the leaves are the loads. A sorted list of the same loads counts those below one.
    """

    def __init__(self, loads: Iterable[int]) -> None:
        leaves = list(loads)
        first = 1
        while first < len(leaves):
            first *= 2
        nodes = [_NO_ENGINE] * first + leaves + [_NO_ENGINE] * (first - len(leaves))
        for node in range(first - 1, 0, -1):
            nodes[node] = min(nodes[2 * node], nodes[2 * node + 1])
        self._nodes = nodes
        self._first_leaf = first
        self._sorted = sorted(leaves)

    def set(self, position: int, load: int) -> None:
        nodes, node = self._nodes, self._first_leaf + position
        if nodes[node] == load:
            return
        del self._sorted[bisect_left(self._sorted, nodes[node])]
        insort(self._sorted, load)
        nodes[node] = load
        while node > 1:
            sibling = nodes[node ^ 1]
            minimum = load if load <= sibling else sibling
            node >>= 1
            if nodes[node] == minimum:
                break
            nodes[node] = load = minimum

    def first_least(self, start: int) -> int:
        """The first position with the smallest load, looking from `start` to the end and then from 0."""
        nodes, node = self._nodes, self._first_leaf + start
        minimum = nodes[1]
        if nodes[node] != minimum:
            # Up, until a subtree to the right has it: from a left child to its sibling.
            while node > 1 and (node & 1 or nodes[node + 1] != minimum):
                node >>= 1
            node = node + 1 if node > 1 else 1  # none from `start` on: the first of all
        while node < self._first_leaf:
            node *= 2
            if nodes[node] != minimum:
                node += 1
        return node - self._first_leaf

    def num_below(self, position: int) -> int:
        """The number of engines with less load than the one at a position."""
        return bisect_left(self._sorted, self._nodes[self._first_leaf + position])


class CacheView(CacheObserver):
    """The prefix cache of one engine, as its events have told it, which take `delay` seconds.

    `node_tokens`: prompt tokens of one event's block. `events`: those that have come and were read so far.
    """

    def __init__(self, node_tokens: int, delay: float = 0.0) -> None:
        super().__init__()
        self.events = 0
        self._node_tokens = node_tokens
        self._delay = delay
        self._cached: dict[int, None] = {}
        self._under_way: deque[tuple[float, bool, int]] = deque()  # when each comes, whether cached, its block

    def publish(self, cached: bool, block: int) -> None:
        self._under_way.append((self.now + self._delay, cached, block))

    def clear(self) -> None:
        """Forget everything: the engine has lost its cache, and all routers know."""
        self._cached.clear()
        self._under_way.clear()

    def cached_prefix_tokens(self, request: Request, now: float) -> int:
        """Leading prompt tokens of a request that are cached, by the events that have come by `now`."""
        under_way = self._under_way
        while under_way and under_way[0][0] <= now:
            _, cached, block = under_way.popleft()
            self.events += 1
            if cached:
                self._cached[block] = None
            else:
                self._cached.pop(block, None)
        nodes = 0
        for block in PATH_HASHES.of(request.prefix_blocks)[: request.prompt_tokens // self._node_tokens]:
            if block not in self._cached:
                break
            nodes += 1
        return nodes * self._node_tokens


class CacheEvents(CacheObserver):
    """Collects the events of one engine, for a router in another process.

    Attributes:
        events: whether each block was cached, and its `PrefixNode.block_hash`, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[bool, int]] = []

    def publish(self, cached: bool, block: int) -> None:
        self.events.append((cached, block))

    def take(self) -> list[tuple[bool, int]]:
        """The events since the last call."""
        events = self.events
        self.events = []
        return events
