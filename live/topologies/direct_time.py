"""Direct execution of a topology: every role runs for real, one at a time, each with a virtual clock of its own.

A role's clock advances by the CPU time of its own work. A message takes the link's time, and a role that waits for it
goes on when it arrives. So a machine with two cores measures bundles of nine workers, and other processes are not
counted. Nothing is predicted but the link.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from latency_models.stages import MessageLink
from live.clock import ClockName
from live.topologies.local import Timekeeper
from live.topologies.transport import Message
from reports.metrics import Transfers


@dataclass(slots=True)
class RoleTime:
    """One role's clock, the CPU time of its work, and its waits for messages, idle ones included; seconds."""

    now: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0


class DirectTime(Timekeeper):
    """The virtual clocks of a topology's roles, which must all compute on one thread.

    The ready role with the lowest time (its own, or its message's arrival) goes first: nothing can come to it later
    that would have arrived earlier. So the order in which roles start has no influence.

    `one_at_a_time`: a message waits until those before it on its link have left. `work`: CPU seconds, by rank, of each
    stretch between sends, waits and readings of the clock, of which the clocks are made.
    """

    name: ClassVar[ClockName] = "direct"

    def __init__(
        self,
        link: MessageLink | None = None,
        cpu: Callable[[], float] = time.thread_time,
        *,
        one_at_a_time: bool = False,
    ) -> None:
        self.link = link or MessageLink()
        self._cpu = cpu
        self._one_at_a_time = one_at_a_time
        self._left: dict[tuple[int, int], float] = {}  # when the latest message left, if they go one at a time
        self.roles: dict[int, RoleTime] = {}
        self.transfers: dict[tuple[int, int], Transfers] = {}
        self.work: dict[int, list[float]] = {}
        self._running: int | None = None
        self._since = 0.0

    def restart(self) -> None:
        """Set all clocks and counts to 0. No message may be on its way."""
        self.roles.clear()
        self.transfers.clear()
        self._left.clear()
        self.work.clear()

    def snapshot(self) -> DirectTime:
        """A copy of the present times and counts."""
        copy = DirectTime(self.link)
        copy.roles, copy.transfers = deepcopy((self.roles, self.transfers))
        copy.work = {rank: stretches.copy() for rank, stretches in self.work.items()}
        return copy

    def now(self, rank: int) -> float:
        if rank == self._running:
            self._end_stretch(rank)
        return self._role(rank).now

    def resume(self, rank: int) -> None:
        self._running = rank
        self._since = self._cpu()

    def pause(self, rank: int) -> None:
        self._end_stretch(rank)
        self._running = None

    def arrival(self, source: int, destination: int, message: Message) -> float:
        size = message.size
        seconds = self.link.seconds(size)
        self.transfers.setdefault((source, destination), Transfers()).add(size, seconds)
        if source == self._running:
            self._end_stretch(source)
        role = self._role(source)
        self._work(role, self.link.overhead)
        if not self._one_at_a_time:
            return role.now + seconds
        pair = source, destination
        left = self._left[pair] = max(role.now, self._left.get(pair, 0.0)) + seconds - self.link.latency
        return left + self.link.latency

    def receive(self, rank: int, arrival: float) -> None:
        self.wait_until(rank, arrival)
        self._work(self._role(rank), self.link.overhead)

    def wait_until(self, rank: int, moment: float) -> None:
        role = self._role(rank)
        if moment > role.now:
            role.waiting += moment - role.now
            role.now = moment

    def first(self, ready: Mapping[int, float]) -> int:
        """The role that goes on earliest, of several the lowest rank."""
        return min(ready, key=lambda rank: (max(self._role(rank).now, ready[rank]), rank))

    def _end_stretch(self, rank: int) -> None:
        until = self._cpu()
        seconds = until - self._since
        self._since = until
        self.work.setdefault(rank, []).append(seconds)
        self._work(self._role(rank), seconds)

    @staticmethod
    def _work(role: RoleTime, seconds: float) -> None:
        role.now += seconds
        role.busy += seconds

    def _role(self, rank: int) -> RoleTime:
        role = self.roles.get(rank)
        if role is None:
            role = self.roles[rank] = RoleTime()
        return role


class Turn(NamedTuple):
    """A role's work from one wait to the next, seconds of its clock. `waited`: it did wait before."""

    begin: float
    end: float
    waited: bool


class Post(NamedTuple):
    """A message: its kind, when it leaves and arrives, seconds, and bytes."""

    kind: int
    departure: float
    arrival: float
    size: int


class RecordedTime(DirectTime):
    """Direct execution that notes the turns of each role and its messages, by rank."""

    def __init__(self, link: MessageLink | None = None) -> None:
        super().__init__(link, one_at_a_time=True)
        self.turns: dict[int, list[Turn]] = {}
        self.posts: dict[int, list[Post]] = {}
        self._turn_begin = 0.0

    def restart(self) -> None:
        super().restart()
        self.turns.clear()
        self.posts.clear()

    def resume(self, rank: int) -> None:
        self._turn_begin = self.now(rank)
        super().resume(rank)

    def pause(self, rank: int) -> None:
        super().pause(rank)
        turns = self.turns.setdefault(rank, [])
        has_waited = not turns or self._turn_begin > turns[-1].end
        turns.append(Turn(self._turn_begin, self.now(rank), has_waited))

    def arrival(self, source: int, destination: int, message: Message) -> float:
        arrival = super().arrival(source, destination, message)
        self.posts.setdefault(source, []).append(Post(message.kind, self.now(source), arrival, message.size))
        return arrival

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as work of the running role."""
        begin = self._cpu()
        try:
            yield
        finally:
            self._since += self._cpu() - begin
