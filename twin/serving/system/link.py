"""A network link over which KV caches are sent."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import simpy
from simpy.events import Event

from twin.environment import Environment, Priority


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Attributes: `bandwidth` bytes/s, `latency` seconds, `bytes_per_token` of KV cache."""

    bandwidth: float
    latency: float
    bytes_per_token: float


class Link:
    """Sends one cache after the other, first come, first served. Contention is waiting for the link.

    Attributes:
        busy: time in which bytes were sent, seconds. moved: bytes sent, including those of interrupted transfers.
        sent: caches that were sent whole. waited: the sum of their waiting times, seconds.
    """

    def __init__(self, env: Environment, speed: LinkSpeed) -> None:
        self.busy = self.moved = self.waited = 0.0
        self.sent = 0
        self._env = env
        self._speed = speed
        self._wire = simpy.Resource(env)

    def send(self, tokens: int) -> Generator[Event, object, None]:
        """Wait for the link, then send the cache of `tokens` tokens until its last byte has left.

        Runs as part of a process. If that process is interrupted, it stops sending and the next cache goes.
        """
        env, size = self._env, tokens * self._speed.bytes_per_token
        requested = env.now
        with self._wire.request() as turn:
            yield turn
            start = env.now
            end = start + size / self._speed.bandwidth
            try:
                yield env.at(end)
            except simpy.Interrupt:
                if env.now > start:
                    self._count((env.now - start) / (end - start) * size)
                raise
        self._count(size)
        self.sent += 1
        self.waited += start - requested

    @property
    def latency(self) -> float:
        """Seconds from the last byte's departure to its arrival."""
        return self._speed.latency

    def arrival(self) -> Event:
        """When a cache arrives whose last byte leaves now."""
        return self._env.at(self._env.now + self._speed.latency, Priority.LATE)

    def _count(self, size: float) -> None:
        self.busy += size / self._speed.bandwidth
        self.moved += size
