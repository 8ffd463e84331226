"""The links between a device and the tiers below it, in which copies of KV blocks wait for each other."""

from __future__ import annotations

from array import array


class CopyLink:
    """One direction of a link, which carries one copy after the other in the order of their requests.

    Attributes:
        busy: time in which bytes were moved, seconds. moved: bytes. waited: the sum of waiting times, seconds.
        copies: their number.
    """

    def __init__(self, bandwidth: float, latency: float) -> None:
        self.busy = self.moved = self.waited = 0.0
        self.copies = 0
        self._bandwidth = bandwidth
        self._latency = latency
        self._free_at = 0.0

    def copy(self, now: float, size: float) -> float:
        """Request a copy of `size` bytes `now`; returns when it is complete, seconds."""
        start = max(now, self._free_at)
        seconds = size / self._bandwidth
        self._free_at = start + seconds
        self.busy += seconds
        self.moved += size
        self.waited += start - now
        self.copies += 1
        return self._free_at + self._latency


class TierLinks:
    """The links of one engine, a pair for each tier.

    Args:
        loads: to load from each tier; engines of one host share them. stores: to store into each, of this engine alone.
        names: of the tiers. node_tokens, node_bytes: of one prefix id.
        capacities: prefix ids that each tier holds.

    Attributes:
        loaded_nodes, stored_nodes: prefix ids that were loaded from each tier and stored in it.
        load_seconds: how long each load took, from the begin of its step to its last byte.
    """

    def __init__(
        self,
        names: list[str],
        loads: list[CopyLink],
        stores: list[CopyLink],
        capacities: list[int],
        node_tokens: int,
        node_bytes: float,
    ) -> None:
        self.names = names
        self.loads = loads
        self.stores = stores
        self.capacities = capacities
        self.node_tokens = node_tokens
        self.node_bytes = node_bytes
        self.loaded_nodes = [0] * len(names)
        self.stored_nodes = [0] * len(names)
        self.load_seconds = array("d")

    def load(self, now: float, nodes_by_tier: list[int]) -> float:
        """Load so many blocks from each tier; returns when all have come, seconds. Tiers load at the same time."""
        end = now
        for tier, nodes in enumerate(nodes_by_tier):
            if nodes:
                end = max(end, self.loads[tier].copy(now, nodes * self.node_bytes))
                self.loaded_nodes[tier] += nodes
        self.load_seconds.append(end - now)
        return end

    def store(self, tier: int, now: float) -> float:
        """Store a block into a tier; returns when it can be read, seconds."""
        self.stored_nodes[tier] += 1
        return self.stores[tier].copy(now, self.node_bytes)
