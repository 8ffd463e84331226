"""Each role in a process of its own: messages over TCP connections, one between every two ranks.

A message goes out in one system call of the thread that sends it, and comes in by two of the thread that waits for it,
so that a hand-over costs one wake-up. A thread sends the rest of messages, such as large caches, that the kernel does
not take at once. The receiver has a buffer for the largest message that the forms allow.

Tensors of GPUs go from device to device (`DeviceLink`), over NCCL. A send starts when the kernels that compute its
tensors have ended, and a receive as soon as it is called: both run on streams of their own, beside the worker's next
kernels. The host waits for neither.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from live.topologies.membership import Address, Membership, listen_at
from live.topologies.transport import (
    HEADER_BYTES,
    STOP,
    Computing,
    Forms,
    Idle,
    Message,
    Payload,
    Receive,
    Role,
    TransportError,
    Wait,
    capacity,
    check_message,
    pack,
    unpack,
)
from live.topologies.transport import select as select_tensors

TAG = 1

MakeGroup: TypeAlias = Callable[[PrefixStore, Membership, timedelta], Any]
"""Makes a process group of all workers, whose operations take at most some time."""


@dataclass
class _Source:
    """Buffers for messages of one source, by turns; `read`: an event behind all readers of the other buffers."""

    buffers: list[dict[int, torch.Tensor]] = field(default_factory=lambda: [{}, {}])
    stream: Any = None
    read: Any = None


class DeviceLink:
    """One worker's side, with a group of all workers for each direction.

    A group's operations run in call order: in a single one, a send could wait for a receive that the peer calls only
    after this worker has received.
    """

    def __init__(self, rank: int, upwards: Any, downwards: Any, limit: timedelta, device: torch.device) -> None:
        self._rank = rank
        self._upwards = upwards
        self._downwards = downwards
        self._limit = limit
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._sources: dict[int, _Source] = {}
        self._sending: dict[int, deque[tuple[Any, torch.Tensor]]] = {}

    def send(self, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, of which those without elements are not sent."""
        group = self._upwards if destination > self._rank else self._downwards
        under_way = self._sending.setdefault(destination, deque())
        for tensor in tensors:
            if not tensor.numel():
                continue
            if len(under_way) >= OUTSTANDING:
                self._finish(under_way.popleft()[0])
            dense = tensor.contiguous()
            under_way.append((group.send([dense.view(-1)], destination, TAG), dense))

    def receive(self, source: int, payloads: Sequence[tuple[int, Payload, int]]) -> list[torch.Tensor]:
        """Receive tensors: (place in the message, payload, rows) of each. They are valid until the next call."""
        group = self._upwards if self._rank > source else self._downwards
        place = self._sources.get(source)
        if place is None:
            place = self._sources[source] = _Source(stream=torch.cuda.Stream() if self._on_gpu else None)
        place.buffers.reverse()
        buffers = place.buffers[0]
        tensors = [self._buffer(buffers, *payload) for payload in payloads]
        with self._receiving(place):
            for tensor in tensors:
                if tensor.numel():
                    self._finish(group.recv([tensor.view(-1)], source, TAG))
        if self._on_gpu:
            torch.cuda.current_stream().wait_stream(place.stream)
        return tensors

    def flush(self) -> None:
        """Wait until everything has been sent."""
        for under_way in self._sending.values():
            while under_way:
                self._finish(under_way.popleft()[0])
        if self._on_gpu:
            torch.cuda.synchronize()

    def abort(self) -> None:
        """End all operations that are under way, with an error: a peer has ended that they wait for."""
        for group in (self._upwards, self._downwards):
            group.abort()

    def _buffer(self, buffers: dict[int, torch.Tensor], place: int, payload: Payload, rows: int) -> torch.Tensor:
        buffer = buffers.get(place)
        if buffer is None or buffer.dtype != payload.dtype or buffer.shape[1:] != payload.row:
            shape = payload.rows, *payload.row
            buffer = buffers[place] = torch.empty(shape, dtype=payload.dtype, device=self._device)
        return buffer[:rows]

    def _receiving(self, place: _Source) -> AbstractContextManager[Any]:
        """The stream on which to receive into the buffers whose turn it is, when these have been read."""
        if not self._on_gpu:
            return nullcontext()
        if place.read is not None:
            place.stream.wait_event(place.read)
        place.read = torch.cuda.current_stream().record_event()
        return torch.cuda.stream(place.stream)

    def _finish(self, work: Any) -> None:
        if self._on_gpu:
            work.wait()
        else:
            work.wait(self._limit)


def device_link(members: Membership, seconds: float, device: str, make_group: MakeGroup | None = None) -> DeviceLink:
    """One worker's side; every wait of a CPU, and to make the groups, takes at most this many seconds."""
    if make_group is None and not dist.is_nccl_available():
        raise members.fail(f"{members.name(members.rank)} has a PyTorch without NCCL")
    limit, make = timedelta(seconds=seconds), make_group or _nccl_group
    try:
        store = group_store(members)
        upwards, downwards = (make(PrefixStore(name, store), members, limit) for name in ("upwards", "downwards"))
    except RuntimeError as error:
        raise members.fail(str(error).splitlines()[0]) from None
    return DeviceLink(members.rank, upwards, downwards, limit, torch.device(device))


def _nccl_group(store: PrefixStore, members: Membership, limit: timedelta) -> Any:
    """An NCCL group of all ranks; those that never send or receive in it need not make it."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, members.rank, len(members.names), options)


def group_store(members: Membership) -> TCPStore:
    """The key-value store by which the members of process groups meet; rank 0, the last to leave, keeps it."""
    limit: Any = {"timeout": timedelta(seconds=10), "wait_for_workers": False, "multi_tenant": False}
    if members.rank:
        address = Address.parse(members.published("store"))
        return TCPStore(address.host, address.port, None, False, **limit)
    with listen_at(Address(members.address, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(members.address, port, None, True, master_listen_fd=os.dup(listener.fileno()), **limit)
    members.publish("store", str(Address(members.address, port)))
    return store


KEEP_ALIVE_SECONDS = 1.0
"""Time that a rank waits for something to do before it looks after the others, and rank 0 shows that it is alive."""

OUTSTANDING = 16
"""Messages to one destination that may wait for the kernel to take them, and sends that a device has under way."""

GREETING = struct.Struct("!16sI")
"""The first bytes of a connection: the topology's secret and the rank that connects."""

GREETING_SECONDS = 1.0
"""Time limit for it: who only connects must not keep the ranks waiting."""


class Connection:
    """One end of the connection between two ranks. Messages are received by one thread, and sent by one."""

    def __init__(self, connected: socket.socket, limit: float) -> None:
        self._socket = connected
        self._limit = limit
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own limits: `settimeout` would ask whether bytes have come before every read.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit), int(limit % 1 * 1e6)))
        self._sender = ThreadPoolExecutor(1, "sender")
        self._pending: deque[Future[None]] = deque()

    def fileno(self) -> int:
        """The file descriptor, for `select`."""
        return self._socket.fileno()

    def receive(self, view: memoryview) -> None:
        """Wait for bytes, as many as the view has. Raises as `send`."""
        while view:
            try:
                count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if not count:
                raise ConnectionResetError
            view = view[count:]

    def send(self, view: memoryview) -> None:
        """Send bytes, which must not change from now on; `TimeoutError` if the peer does not read, else `OSError`."""
        self._wait(OUTSTANDING - 1)
        if not self._pending:
            with contextlib.suppress(BlockingIOError):
                view = view[self._socket.send(view, socket.MSG_DONTWAIT) :]
            if not view:
                return
        self._pending.append(self._sender.submit(self._send_all, view))

    def flush(self) -> None:
        """Wait until the kernel has everything. Raises as `send`."""
        self._wait(0)

    def interrupt(self) -> None:
        """End all waits, of the peer too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and the thread that sends. The peer still gets what the kernel has."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def _wait(self, max_pending: int) -> None:
        """Wait until no more sends than these are pending; an error of one is raised again and again."""
        while self._pending and (len(self._pending) > max_pending or self._pending[0].done()):
            self._pending[0].result(self._limit)
            self._pending.popleft()

    def _send_all(self, view: memoryview) -> None:
        try:
            self._socket.sendall(view)
        except BlockingIOError:
            raise TimeoutError from None


def connect_all(members: Membership, limit: float) -> dict[int, Connection]:
    """A connection to every other rank; each connects to those below it, and turns callers without the secret away."""
    rank, count = members.rank, len(members.names)
    connections: dict[int, Connection] = {}
    if rank == 0:
        members.publish("secret", secrets.token_hex(8))
    with listen_at(Address(members.address, 0)) as listener:
        members.publish(f"listens/{rank}", str(Address(members.address, listener.getsockname()[1])))
        secret = members.published("secret").encode()
        for lower in range(rank):
            address = Address.parse(members.published(f"listens/{lower}"))
            try:
                connected = socket.create_connection((address.host, address.port), limit)
                connected.sendall(GREETING.pack(secret, rank))
            except OSError as error:
                reason = f"cannot be reached at {address} ({error.strerror or 'no answer'})"
                raise members.blame(lower, reason) from None
            connections[lower] = Connection(connected, limit)
        listener.settimeout(limit)
        while missing := [higher for higher in range(rank + 1, count) if higher not in connections]:
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                raise members.blame(missing[0], f"has not connected within {limit:g} s") from None
            higher = _greeting_rank(caller, secret)
            if higher in missing:
                connections[higher] = Connection(caller, limit)
            else:
                caller.close()
    return connections


def _greeting_rank(caller: socket.socket, secret: bytes) -> int:
    """The rank of a caller that knows the secret; -1 for others."""
    caller.settimeout(GREETING_SECONDS)
    try:
        secret_of_caller, rank = GREETING.unpack(caller.recv(GREETING.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return -1
    return int(rank) if hmac.compare_digest(secret_of_caller, secret) else -1


class SocketTransport:
    """One role's side, as `Transport`, and what drives it; without a link, devices' tensors pass the host, too."""

    def __init__(self, members: Membership, forms: Forms, limit: float, link: DeviceLink | None = None) -> None:
        self.rank = members.rank
        self._link = link
        self._members = members
        self._forms = forms
        self._limit = limit
        self._is_front = members.rank == 0
        self._connections = connect_all(members, limit)
        size = capacity(forms)
        self._buffers = {source: torch.empty(size, dtype=torch.uint8) for source in self._connections}
        self._views = {source: _bytes_of(buffer) for source, buffer in self._buffers.items()}
        self._received = 0
        self._served = dict.fromkeys(self._connections, 0)  # how many messages had come with the latest of a source
        self._stopped: set[int] = set()
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._poll = cache(self._make_poll)
        for connection in self._connections.values():
            members.on_failure(connection.interrupt)

    def clock(self) -> float:
        return time.perf_counter()

    def send(self, destination: int, message: Message) -> None:
        check_message(message, self._forms)
        form = None if self._link is None else self._forms[message.kind]
        try:
            self._connections[destination].send(_bytes_of(pack(message, form)))
            if self._link is not None and form is not None:
                self._link.send(destination, select_tensors(message, form, on_device=True))
        except (OSError, RuntimeError) as error:
            raise self._blame(destination, error) from None

    def receive(self, source: int) -> Message:
        connection, buffer, view = self._connections[source], self._buffers[source], self._views[source]
        try:
            connection.receive(view[:HEADER_BYTES])
            size = int(buffer[:HEADER_BYTES].view(torch.int64)[-1])
            if not HEADER_BYTES <= size <= len(view):
                raise TransportError(f"a message of {size} bytes: expected {HEADER_BYTES} to {len(view)}")
            connection.receive(view[HEADER_BYTES:size])
            apart = None if self._link is None else partial(self._link.receive, source)
            message = unpack(buffer, self._forms, apart)
        except TransportError as error:
            raise self._members.fail(f"{self._members.name(source)} sent {error}") from None
        except (OSError, RuntimeError) as error:
            raise self._blame(source, error) from None
        self._received += 1
        self._served[source] = self._received
        if message.kind == STOP:
            self._stopped.add(source)
        return message

    def wake(self) -> None:
        """Resume the role if it is idle, or waits for a message of any source. May be called from any thread."""
        with contextlib.suppress(OSError):  # it has been woken often enough, or is closed
            self._wakes.send(b"1")

    def run(self, role: Role) -> None:
        """Run a role to its end, and wait until everything has been sent."""
        message: Message | None = None
        with torch.inference_mode(), contextlib.suppress(StopIteration):
            while True:
                message = self._await(role.send(message))
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
        self._woken.close()
        self._wakes.close()

    def _await(self, wait: Wait) -> Message | None:
        if isinstance(wait, Receive):
            return self.receive(wait.source)
        if isinstance(wait, Idle):
            return self._next((), KEEP_ALIVE_SECONDS)
        if isinstance(wait, Computing):
            return None  # there is no other role to go on, and the step waits for its output itself
        if not wait.wait:
            return self._next(wait.sources, 0.0)
        limit = math.inf if wait.patient else self._limit
        return self._next(wait.sources, KEEP_ALIVE_SECONDS if self._is_front else limit)

    def _next(self, sources: tuple[int, ...], seconds: float) -> Message | None:
        """A message of the source that was served least recently; None if the role is woken, or for none in time."""
        deadline = time.monotonic() + seconds
        sources = tuple(source for source in sources if source not in self._stopped)
        poll = self._poll(sources)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(1e3 * min(seconds, KEEP_ALIVE_SECONDS))]
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                return None
            if ready:
                sending = [source for source in sources if self._connections[source].fileno() in ready]
                return self.receive(min(sending, key=self._served.__getitem__))
            if not seconds:
                return None
            self._members.check()  # another rank may have failed: nothing else would tell this one
            if self._is_front:
                return None
            if time.monotonic() > deadline:
                raise self._members.blame(0, f"has not answered within {self._limit:g} s") from None

    def _make_poll(self, sources: tuple[int, ...]) -> select.poll:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        for source in sources:
            poll.register(self._connections[source], select.POLLIN)
        return poll

    def _blame(self, peer: int, error: OSError | RuntimeError) -> TransportError:
        if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
            return self._members.blame(peer, f"has not answered within {self._limit:g} s")
        text = str(error).lower()
        is_lost = isinstance(error, OSError) or "closed" in text or "reset" in text
        return self._members.blame(peer, "has ended" if is_lost else f"cannot be reached ({str(error)[:160]})")


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    return memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers from Python 3.12 on
