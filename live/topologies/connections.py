"""TCP connections between the processes of a topology, and how they are made.

A message goes out in one system call of the thread that sends it, and comes in by two of the thread that waits for it,
so that a hand-over costs one wake-up. What the kernel does not take at once, as of large caches, a thread sends.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections import deque

from live.topologies.membership import Address, Membership, listen_at

OUTSTANDING = 16
"""Messages to one destination that may wait for the kernel to take them."""

GREETING = struct.Struct("!16sI")
"""The first bytes of a connection: the topology's secret and the rank that connects."""


GREETING_SECONDS = 1.0
"""Time limit for it: who only connects must not keep the ranks waiting."""


class Connection:
    """One end of the connection between two ranks. Messages are received by one thread, and sent by one.

    Args:
        limit: seconds that a wait may take.
    """

    def __init__(self, connected: socket.socket, limit: float) -> None:
        self._socket, self._limit = connected, limit
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own limits: `settimeout` would ask whether bytes have come before every read.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit), int(limit % 1 * 1e6)))
        self._pending: deque[memoryview] = deque()  # the first is being sent
        self._changed = threading.Condition()
        self._sender: threading.Thread | None = None
        self._error: OSError | None = None

    def fileno(self) -> int:
        """The file descriptor, for `select`."""
        return self._socket.fileno()

    def receive(self, view: memoryview) -> None:
        """Wait for bytes, as many as the view has.

        Raises:
            TimeoutError: they do not come within the limit. OSError: the peer has ended.
        """
        while view:
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if not count:
                raise ConnectionResetError
            view = view[count:]

    def send(self, view: memoryview) -> None:
        """Send bytes, which must not change from now on.

        Raises:
            TimeoutError: the peer does not read. OSError: it has ended.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._pending:
                view = view[self._send_now(view) :]
                if not view:
                    return
            if not self._changed.wait_for(self._has_room, self._limit):
                raise TimeoutError
            self._pending.append(view)
            self._changed.notify_all()
            if self._sender is None:
                self._sender = threading.Thread(target=self._send_pending, name="sender", daemon=True)
                self._sender.start()

    def flush(self) -> None:
        """Wait until the kernel has everything.

        Raises:
            TimeoutError: the peer does not read. OSError: it has ended.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._pending or self._error is not None, self._limit):
                raise TimeoutError
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the connection, and the thread that sends. The peer still gets what the kernel has."""
        with self._changed:
            self._error = self._error or ConnectionAbortedError()
            self._changed.notify_all()
        self._socket.close()

    def _has_room(self) -> bool:
        return len(self._pending) < OUTSTANDING or self._error is not None

    def _send_now(self, view: memoryview) -> int:
        try:
            return self._socket.send(view, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _send_pending(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._error is not None)
                if self._error is not None:
                    return
                view = self._pending[0]
            try:
                self._socket.sendall(view)
            except OSError as error:
                with self._changed:
                    self._error = TimeoutError() if isinstance(error, BlockingIOError) else error
                    self._changed.notify_all()
                return
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()


def connect_all(members: Membership, limit: float) -> dict[int, Connection]:
    """A connection to every other rank, by rank. All ranks call this; each connects to those below it.

    A rank listens at the address that it has towards the others: on one machine at loopback. Callers that do not know
    the topology's secret, which is in rank 0's store, are turned away.

    Raises:
        TransportError: a rank does not come.
    """
    rank, count = members.rank, len(members.names)
    connections: dict[int, Connection] = {}
    if rank == 0:
        members.publish("secret", secrets.token_hex(8))
    with listen_at(Address(members.address, 0)) as listener:
        members.publish(f"listens/{rank}", str(Address(members.address, listener.getsockname()[1])))
        secret = members.published("secret").encode()
        for lower in range(rank):
            address = Address.parse(members.published(f"listens/{lower}"))
            connections[lower] = _call(members, lower, address, GREETING.pack(secret, rank), limit)
        listener.settimeout(limit)
        while len(connections) < count - 1:
            missing = next(other for other in range(count) if other != rank and other not in connections)
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                raise members.blame(missing, f"has not connected within {limit:g} s") from None
            caller.settimeout(GREETING_SECONDS)
            higher = _greeted(caller, secret)
            if higher is None or not rank < higher < count or higher in connections:
                caller.close()
                continue
            connections[higher] = Connection(caller, limit)
    return connections


def _call(members: Membership, rank: int, address: Address, greeting: bytes, limit: float) -> Connection:
    try:
        called = socket.create_connection((address.host, address.port), limit)
        called.sendall(greeting)
    except OSError as error:
        raise members.blame(rank, f"cannot be reached at {address} ({error.strerror or 'no answer'})") from None
    return Connection(called, limit)


def _greeted(caller: socket.socket, secret: bytes) -> int | None:
    """The rank of a caller that knows the secret; None for others."""
    found = b""
    try:
        while len(found) < GREETING.size:
            part = caller.recv(GREETING.size - len(found))
            if not part:
                return None
            found += part
    except OSError:
        return None
    known, rank = GREETING.unpack(found)
    return int(rank) if hmac.compare_digest(known, secret) else None
