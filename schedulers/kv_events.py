"""Cache events: what a router knows of the prefix caches of engines that it does not share memory with.

An engine publishes an event for each block that enters or leaves its prefix cache, as vLLM does (`KVEventsConfig`) and
NVIDIA Dynamo's and llm-d's routers read. Events take time to come, so a router's view is stale: it may expect a prefix
that was evicted, or not know one that has just been computed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from schedulers.kv_cache import PATH_HASHES, CacheObserver

if TYPE_CHECKING:
    from workloads.request import Request


class CacheView(CacheObserver):
    """The prefix cache of one engine, as its events have told it.

    Args:
        node_tokens: prompt tokens of one event's block. delay: seconds that an event takes.

    Attributes:
        events: events that have come and were read so far.
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
