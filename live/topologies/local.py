"""All roles in one process, one at a time: for tests, and for machines with fewer cores than a topology has workers.

Every message passes through `LocalNetwork`, and every stretch of a role's work runs between two calls of its
`Timekeeper`. So a timekeeper can give each role a clock of its own: it advances by what the role's own work takes, and
a message arrives when it would arrive over a link. `WallTime` is the timekeeper that does neither.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from live.topologies.transport import (
    Forms,
    Idle,
    Message,
    Receive,
    ReceiveAny,
    Role,
    TransportError,
    Wait,
    check_message,
)


class Timekeeper(Protocol):
    """The clocks of the roles, by rank. All times are in seconds."""

    def now(self, rank: int) -> float:
        """A role's time."""
        ...

    def resume(self, rank: int) -> None:
        """A role's work goes on."""
        ...

    def pause(self, rank: int) -> None:
        """A role waits."""
        ...

    def arrival(self, source: int, destination: int, size: int) -> float:
        """When a message of `size` bytes arrives that a role sends now."""
        ...

    def receive(self, rank: int, arrival: float) -> None:
        """A role takes a message that arrived at this time."""
        ...

    def first(self, ranks: Sequence[int]) -> int:
        """Choose which of several roles that can go on does so first."""
        ...


class WallTime:
    """The clock on the wall: messages arrive at once, and roles take turns."""

    def now(self, rank: int) -> float:
        """See `Timekeeper.now`."""
        return time.perf_counter()

    def resume(self, rank: int) -> None:
        """See `Timekeeper.resume`."""

    def pause(self, rank: int) -> None:
        """See `Timekeeper.pause`."""

    def arrival(self, source: int, destination: int, size: int) -> float:
        """See `Timekeeper.arrival`."""
        return 0.0

    def receive(self, rank: int, arrival: float) -> None:
        """See `Timekeeper.receive`."""

    def first(self, ranks: Sequence[int]) -> int:
        """See `Timekeeper.first`: the one that has waited longest."""
        return ranks[0]


class _InTransit(NamedTuple):
    """A message on its way. `order`: the number of messages sent before it."""

    arrival: float
    order: int
    message: Message


class LocalTransport:
    """One role's side of a `LocalNetwork`, as `Transport`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self.rank, self._network = rank, network

    def send(self, destination: int, message: Message) -> None:
        """See `Transport.send`."""
        self._network.post(self.rank, destination, message)

    def clock(self) -> float:
        """See `Transport.clock`."""
        return self._network.timekeeper.now(self.rank)


class LocalNetwork:
    """Runs roles in turns and carries their messages.

    Attributes:
        sent: messages sent so far. timekeeper: the roles' clocks.
    """

    def __init__(self, forms: Forms, timekeeper: Timekeeper | None = None) -> None:
        self.timekeeper = timekeeper or WallTime()
        self.sent = 0
        self._forms = forms
        self._mail: dict[tuple[int, int], deque[_InTransit]] = {}
        self._roles: dict[int, Role] = {}
        self._waits: dict[int, Wait] = {}  # of the roles that wait, the longest first

    def transport(self, rank: int) -> LocalTransport:
        """The side of one role."""
        return LocalTransport(self, rank)

    def post(self, source: int, destination: int, message: Message) -> None:
        """Put a message in the mail."""
        check_message(message, self._forms)
        arrival = self.timekeeper.arrival(source, destination, message.size)
        self._mail.setdefault((source, destination), deque()).append(_InTransit(arrival, self.sent, message))
        self.sent += 1

    @torch.inference_mode()
    def start(self, roles: Mapping[int, Role]) -> None:
        """Run each role, by rank, until it first waits."""
        for rank, role in roles.items():
            self._roles[rank] = role
            self._go_on(rank, None)

    @torch.inference_mode()
    def run(self) -> None:
        """Run until every role has ended, or is idle or waits for one that is.

        Raises:
            TransportError: roles wait for one another.
        """
        while ready := [rank for rank, wait in self._waits.items() if self._ready(rank, wait)]:
            rank = self.timekeeper.first(ready)
            self._go_on(rank, self._take(rank, self._waits[rank]))
        if self._waits and not any(isinstance(wait, Idle) for wait in self._waits.values()):
            waits = "; ".join(f"rank {rank} for {wait}" for rank, wait in self._waits.items())
            raise TransportError(f"roles wait for one another: {waits}")

    @torch.inference_mode()
    def wake(self, rank: int) -> None:
        """Resume a role that is idle."""
        if isinstance(self._waits.get(rank), Idle):
            self._go_on(rank, None)

    @property
    def ended(self) -> bool:
        """True when every role has ended."""
        return not self._waits

    def _go_on(self, rank: int, message: Message | None) -> None:
        self._waits.pop(rank, None)
        self.timekeeper.resume(rank)
        try:
            self._waits[rank] = self._roles[rank].send(message)
        except StopIteration:
            del self._roles[rank]
        finally:
            self.timekeeper.pause(rank)

    def _ready(self, rank: int, wait: Wait) -> bool:
        if isinstance(wait, Receive):
            return bool(self._mail.get((wait.source, rank)))
        if isinstance(wait, ReceiveAny):
            return not wait.wait or any(self._mail.get((source, rank)) for source in wait.sources)
        return False

    def _take(self, rank: int, wait: Wait) -> Message | None:
        """The message that a role waits for; None for one that did not want to wait."""
        sources = (wait.source,) if isinstance(wait, Receive) else getattr(wait, "sources", ())
        queues = [queue for source in sources if (queue := self._mail.get((source, rank)))]
        if isinstance(wait, ReceiveAny) and not wait.wait:
            now = self.timekeeper.now(rank)
            queues = [queue for queue in queues if queue[0].arrival <= now]
        if not queues:
            return None
        taken = min(queues, key=lambda queue: queue[0][:2]).popleft()
        self.timekeeper.receive(rank, taken.arrival)
        return taken.message
