"""A link over which KV caches move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from twin.clock import Clock
from twin.serving.engine import LATE_RANK


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Attributes: `bandwidth` bytes/s, `latency` seconds, `bytes_per_token` of KV cache."""

    bandwidth: float
    latency: float
    bytes_per_token: float


class Transfer:
    """One cache on its way. `start` and `end`: when its first byte goes and its last has gone, as far as is known now.

    `asked`: when it was handed in. `arrived`: what to do when it is there. `alarm`: the call that will do it.
    """

    __slots__ = ("alarm", "arrived", "asked", "end", "size", "start")

    def __init__(self, size: float, asked: float, arrived: Callable[[], None]) -> None:
        self.size, self.asked, self.arrived = size, asked, arrived
        self.start = self.end = asked
        self.alarm = -1


class Link:
    """Moves one cache after the other, first come, first served: contention is waiting for the link.

    Attributes:
        busy: seconds in which bytes moved. moved: bytes, those of transfers that were broken off included. sent: caches
            that arrived. waited: seconds that these stood in line, summed.
    """

    def __init__(self, clock: Clock, speed: LinkSpeed) -> None:
        self.busy = self.moved = self.waited = 0.0
        self.sent = 0
        self._clock, self._speed = clock, speed
        self._free_at = 0.0
        self._line: deque[Transfer] = deque()  # not arrived yet, in the order in which they go

    def send(self, tokens: int, arrived: Callable[[], None]) -> Transfer:
        """Move the cache of so many tokens, then call `arrived`."""
        transfer = Transfer(tokens * self._speed.bytes_per_token, self._clock.now, arrived)
        self._line.append(transfer)
        self._plan(transfer)
        return transfer

    def break_off(self, lost: Collection[Transfer]) -> set[Transfer]:
        """Stop those of `lost` whose last byte has not gone, and return them; whoever stands behind moves up."""
        now = self._clock.now
        broken = {transfer for transfer in lost if transfer.end > now}
        if not broken:
            return broken
        self._free_at = now
        line, self._line = self._line, deque()
        for transfer in line:
            if transfer in broken:
                transfer.alarm = -1
                if transfer.start < now:
                    self._count((now - transfer.start) / (transfer.end - transfer.start) * transfer.size)
                continue
            self._line.append(transfer)
            if transfer.start <= now:  # under way, or gone and not there yet
                self._free_at = max(self._free_at, transfer.end)
            else:
                self._plan(transfer)
        return broken

    def _plan(self, transfer: Transfer) -> None:
        transfer.start = max(self._clock.now, self._free_at)
        transfer.end = self._free_at = transfer.start + transfer.size / self._speed.bandwidth

        def end(number: int) -> None:
            if number == transfer.alarm:  # it was not broken off, nor moved up
                self._arrive(transfer)

        transfer.alarm = self._clock.call(transfer.end + self._speed.latency, LATE_RANK, end)

    def _arrive(self, transfer: Transfer) -> None:
        self._line.popleft()  # they arrive in the order in which they go
        self._count(transfer.size)
        self.sent += 1
        self.waited += transfer.start - transfer.asked
        transfer.arrived()

    def _count(self, size: float) -> None:
        self.busy += size / self._speed.bandwidth
        self.moved += size
