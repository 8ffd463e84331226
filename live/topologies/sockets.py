"""Each role in a process of its own: messages over TCP connections.

A message is sent as one buffer of bytes (`live.topologies.packing`). The receiver has a buffer for the largest message
that the forms allow. On GPUs the buffer has no tensors of the devices: `live.topologies.device_link` carries these.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from live.topologies.connections import connect_all
from live.topologies.device_link import DeviceLink
from live.topologies.membership import Membership
from live.topologies.packing import HEADER_BYTES, as_bytes, capacity, message_bytes, on_device, pack, unpack
from live.topologies.transport import STOP, Forms, Idle, Message, Receive, Role, TransportError, Wait, check_message

KEEP_ALIVE_SECONDS = 1.0
"""Time that a rank waits for something to do before it looks after the others, and rank 0 shows that it is alive."""

Poll: TypeAlias = "select.poll"


@dataclass
class _Incoming:
    """Messages of one source: a buffer for the latest, the same as a view, and whether more may come.

    Attributes:
        served: how many messages this rank had received when it received the latest.
    """

    buffer: torch.Tensor
    view: memoryview
    stopped: bool = False
    served: int = 0


class SocketTransport:
    """One role's side, as `Transport`, and what drives the role.

    Args:
        members: this rank's place among the others, gathered. limit: seconds that any wait may take.
        link: carries the tensors of the workers' devices; None: they go through the host, too.
    """

    def __init__(self, members: Membership, forms: Forms, limit: float, link: DeviceLink | None = None) -> None:
        self.rank, self._link = members.rank, link
        self._members, self._forms, self._limit = members, forms, limit
        self._is_front = members.rank == 0
        self._connections = connect_all(members, limit)
        size = capacity(forms)
        self._incoming = {source: _incoming(size) for source in self._connections}
        self._received = 0
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._polls: dict[tuple[int, ...], Poll] = {}

    def clock(self) -> float:
        """See `Transport.clock`."""
        return time.perf_counter()

    def send(self, destination: int, message: Message) -> None:
        """See `Transport.send`."""
        check_message(message, self._forms)
        form = None if self._link is None else self._forms[message.kind]
        buffer = pack(message, form)
        try:
            self._connections[destination].send(as_bytes(buffer))
            if self._link is not None and form is not None:
                self._link.send(destination, on_device(message, form))
        except (OSError, RuntimeError) as error:
            raise self._blame(destination, error) from None

    def receive(self, source: int) -> Message:
        """The next message from a source.

        Raises:
            TransportError: none comes within the limit, the source has ended, or it sends what it must not.
        """
        incoming, connection = self._incoming[source], self._connections[source]
        buffer, view = incoming.buffer, incoming.view
        try:
            connection.receive(view[:HEADER_BYTES])
            size = message_bytes(buffer[:HEADER_BYTES])
            if not size or size > len(view):
                raise TransportError(f"a message of {size} bytes: expected {HEADER_BYTES} to {len(view)}")
            connection.receive(view[HEADER_BYTES:size])
            apart = None if self._link is None else partial(self._link.receive, source)
            message = unpack(buffer, self._forms, apart)
        except TransportError as error:
            raise self._members.fail(f"{self._members.name(source)} sent {error}") from None
        except (OSError, RuntimeError) as error:
            raise self._blame(source, error) from None
        self._received += 1
        incoming.served, incoming.stopped = self._received, message.kind == STOP
        return message

    def wake(self) -> None:
        """Resume the role if it is idle, or waits for a message of any source. May be called from any thread."""
        try:
            self._wakes.send(b"1")
        except BlockingIOError:
            return  # it has been woken often enough

    def run(self, role: Role) -> None:
        """Run a role to its end.

        Raises:
            TransportError: a wait has failed.
        """
        message: Message | None = None
        with torch.inference_mode():
            while True:
                try:
                    wait = role.send(message)
                except StopIteration:
                    break
                message = self._await(wait)
        self.flush()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for destination, connection in self._connections.items():
            try:
                connection.flush()
            except OSError as error:
                raise self._blame(destination, error) from None
        if self._link is not None:
            self._link.flush()

    def close(self) -> None:
        """Close the connections: the others notice it at once. Messages that have not been read are lost."""
        for connection in self._connections.values():
            connection.close()

    def _await(self, wait: Wait) -> Message | None:
        if isinstance(wait, Receive):
            return self.receive(wait.source)
        if isinstance(wait, Idle):
            return self._next((), KEEP_ALIVE_SECONDS)
        if not wait.wait:
            return self._next(wait.sources, 0.0)
        return self._next(wait.sources, KEEP_ALIVE_SECONDS if self._is_front else self._limit)

    def _next(self, sources: tuple[int, ...], seconds: float) -> Message | None:
        """A message of any of the sources; None if the role is woken, or for none in time.

        Of several sources that have sent something, it is the one that was served least recently.

        Raises:
            TransportError: a source has ended, or the front does not answer within the limit.
        """
        deadline = time.monotonic() + seconds
        sources = tuple(source for source in sources if not self._incoming[source].stopped)
        poll = self._poll(sources)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(1e3 * min(seconds, KEEP_ALIVE_SECONDS))]
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                return None
            if ready:
                having = [source for source in sources if self._connections[source].fileno() in ready]
                return self.receive(min(having, key=lambda source: self._incoming[source].served))
            if not seconds:
                return None
            self._members.check()  # another rank may have failed: nothing else would tell this one
            if self._is_front:
                return None
            if time.monotonic() > deadline:
                raise self._members.blame(0, f"has not answered within {self._limit:g} s") from None

    def _poll(self, sources: tuple[int, ...]) -> Poll:
        found = self._polls.get(sources)
        if found is None:
            found = self._polls[sources] = select.poll()
            found.register(self._woken, select.POLLIN)
            for source in sources:
                found.register(self._connections[source].fileno(), select.POLLIN)
        return found

    def _blame(self, peer: int, error: OSError | RuntimeError) -> TransportError:
        """The fate of a peer, from the error of a wait for it."""
        if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
            return self._members.blame(peer, f"has not answered within {self._limit:g} s")
        text = str(error).lower()
        ended = isinstance(error, OSError) or "closed" in text or "reset" in text
        return self._members.blame(peer, "has ended" if ended else f"cannot be reached ({str(error)[:160]})")


def _incoming(size: int) -> _Incoming:
    buffer = torch.empty(size, dtype=torch.uint8)
    return _Incoming(buffer, as_bytes(buffer))
