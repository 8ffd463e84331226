"""A link over which KV caches move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twin.clock import Clock
from twin.serving.engine import LATE_RANK


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Attributes: `bandwidth` bytes/s, `latency` seconds, `bytes_per_token` of KV cache."""

    bandwidth: float
    latency: float
    bytes_per_token: float


class Link:
    """Moves one cache after the other, first come, first served: contention is waiting for the link.

    Attributes:
        busy: seconds in which bytes moved. moved: bytes. sent: caches. waited: seconds that they stood in line, summed.
    """

    def __init__(self, clock: Clock, speed: LinkSpeed) -> None:
        self.busy = self.moved = self.waited = 0.0
        self.sent = 0
        self._clock, self._speed = clock, speed
        self._free_at = 0.0

    def send(self, tokens: int, arrived: Callable[[], None]) -> None:
        """Move the cache of so many tokens, then call `arrived`."""
        now, speed = self._clock.now, self._speed
        size = tokens * speed.bytes_per_token
        start = max(now, self._free_at)
        self._free_at = start + size / speed.bandwidth
        self.busy += size / speed.bandwidth
        self.moved += size
        self.sent += 1
        self.waited += start - now

        def end(number: int) -> None:
            arrived()

        self._clock.call(self._free_at + speed.latency, LATE_RANK, end)
