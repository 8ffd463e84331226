"""Direct execution of a topology: every role runs for real, one at a time, each with a virtual clock of its own.

A role's clock advances by the CPU time of its own work. A message takes the link's time, and a role that waits for it
goes on when it arrives. So a machine with two cores measures bundles of nine workers, and other processes are not
counted. Nothing is predicted but the link.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from live.clock import ClockName


@dataclass(frozen=True, slots=True)
class Link:
    """The link between any two roles; every pair has one of its own in each direction.

    Attributes:
        latency: seconds of a message of any size. bandwidth: bytes per second.
        overhead: CPU seconds that sending takes the sender and receiving the receiver, beyond what they really do in
            this process.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0

    def seconds(self, size: int) -> float:
        """Time of a message of so many bytes."""
        return self.latency + size / self.bandwidth


@dataclass(slots=True)
class RoleTime:
    """One role's time, seconds.

    Attributes:
        now: its clock. busy: CPU time of its work. waiting: for messages, while idle too.
    """

    now: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0


@dataclass(slots=True)
class Transfers:
    """Messages from one role to another: how many, the bytes of their tensors, and seconds on the link together."""

    messages: int = 0
    size: int = 0
    seconds: float = 0.0


class DirectTime:
    """The virtual clocks of a topology's roles, as `live.topologies.local.Timekeeper`.

    A role that is ready goes on at its own time, or when its message arrives if that is later. The role for which this
    time is lowest goes first: no message can come to it later that would have arrived earlier, since links have no
    negative latency. So the order in which roles start has no influence.

    Args:
        cpu: the CPU time of the thread that all roles run on, seconds. Roles must compute on this thread alone
            (`torch.set_num_threads(1)`).

    Attributes:
        name: of the clock, as results carry it. roles: times by rank. transfers: by source and destination.
    """

    name: ClassVar[ClockName] = "direct"

    def __init__(self, link: Link | None = None, cpu: Callable[[], float] = time.thread_time) -> None:
        self.link, self._cpu = link or Link(), cpu
        self.roles: dict[int, RoleTime] = {}
        self.transfers: dict[tuple[int, int], Transfers] = {}
        self._running: int | None = None
        self._resumed = 0.0

    def restart(self) -> None:
        """Set all clocks and counts to 0. No message may be on its way."""
        self.roles.clear()
        self.transfers.clear()

    def now(self, rank: int) -> float:
        """See `Timekeeper.now`."""
        running = self._cpu() - self._resumed if rank == self._running else 0.0
        return self._role(rank).now + running

    def resume(self, rank: int) -> None:
        """See `Timekeeper.resume`."""
        self._running, self._resumed = rank, self._cpu()

    def pause(self, rank: int) -> None:
        """See `Timekeeper.pause`."""
        self._running = None
        self._work(self._role(rank), self._cpu() - self._resumed)

    def arrival(self, source: int, destination: int, size: int) -> float:
        """See `Timekeeper.arrival`."""
        seconds = self.link.seconds(size)
        transfers = self.transfers.setdefault((source, destination), Transfers())
        transfers.messages += 1
        transfers.size += size
        transfers.seconds += seconds
        self._work(self._role(source), self.link.overhead)
        return self.now(source) + seconds

    def receive(self, rank: int, arrival: float) -> None:
        """See `Timekeeper.receive`."""
        role = self._role(rank)
        if arrival > role.now:
            role.waiting += arrival - role.now
            role.now = arrival
        self._work(role, self.link.overhead)

    def first(self, ready: Mapping[int, float]) -> int:
        """See `Timekeeper.first`: the one that goes on earliest, of several the lowest rank."""
        return min(ready, key=lambda rank: (max(self._role(rank).now, ready[rank]), rank))

    @staticmethod
    def _work(role: RoleTime, seconds: float) -> None:
        role.now += seconds
        role.busy += seconds

    def _role(self, rank: int) -> RoleTime:
        role = self.roles.get(rank)
        if role is None:
            role = self.roles[rank] = RoleTime()
        return role
