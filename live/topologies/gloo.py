"""Each role in a process of its own: messages over torch.distributed's gloo backend.

A message is sent as one buffer of bytes (`live.topologies.packing`). The receiver has a buffer for the largest message
that the forms allow. On GPUs the buffer has no tensors of the devices: `live.topologies.device_link` carries these.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from live.topologies.device_link import DeviceLink
from live.topologies.membership import Membership
from live.topologies.packing import capacity, on_device, pack, unpack
from live.topologies.transport import (
    STOP,
    Forms,
    Idle,
    Message,
    Receive,
    Role,
    TransportError,
    Wait,
    check_message,
)

OUTSTANDING = 16
"""Messages to one destination that may be under way at a time."""

TAG = 0

KEEP_ALIVE_SECONDS = 1.0
"""Time that rank 0 waits for something to do before it shows the others that it is alive."""

UNLIMITED = timedelta(days=1000)


class GlooTransport:
    """One role's side, as `Transport`, and what drives the role.

    Args:
        members: this rank's place among the others, gathered. limit: seconds that any wait may take.
        link: carries the tensors of the workers' devices; None: they go through the host, too.
    """

    def __init__(self, members: Membership, forms: Forms, limit: float, link: DeviceLink | None = None) -> None:
        self.rank, self._link = members.rank, link
        self._members, self._forms, self._limit = members, forms, limit
        self._group: Any = members.group(limit)
        self._wait_limit = timedelta(seconds=limit)
        self._capacity = capacity(forms)
        self._buffers: dict[int, torch.Tensor] = {}
        self._is_front, self._closing = members.rank == 0, False
        self._mail: queue.SimpleQueue[Message | TransportError | None] = queue.SimpleQueue()
        self._listeners: dict[int, threading.Thread] = {}
        self._sending: dict[int, deque[tuple[Any, torch.Tensor]]] = {}

    def clock(self) -> float:
        """See `Transport.clock`."""
        return time.perf_counter()

    def send(self, destination: int, message: Message) -> None:
        """See `Transport.send`."""
        check_message(message, self._forms)
        form = None if self._link is None else self._forms[message.kind]
        buffer = pack(message, form)
        under_way = self._sending.setdefault(destination, deque())
        if len(under_way) >= OUTSTANDING:
            self._finish(under_way.popleft()[0], destination)
        try:
            under_way.append((self._group.send([buffer], destination, TAG), buffer))
            if self._link is not None and form is not None:
                self._link.send(destination, on_device(message, form))
        except RuntimeError as error:
            raise self._members.blame(destination, _reason(error)) from None

    def receive(self, source: int, limit: timedelta | None = None) -> Message:
        """The next message from a source. `limit`: in place of the transport's own.

        Raises:
            TransportError: none comes within the limit, the source has ended, or it sends what it must not.
        """
        buffer = self._buffers.get(source)
        if buffer is None:
            buffer = self._buffers[source] = torch.empty(self._capacity, dtype=torch.uint8)
        try:
            work = self._group.recv([buffer], source, TAG)
        except RuntimeError as error:
            raise self._members.blame(source, _reason(error)) from None
        self._finish(work, source, limit)
        try:
            return unpack(buffer, self._forms, None if self._link is None else partial(self._link.receive, source))
        except TransportError as error:
            raise self._members.fail(f"{self._members.name(source)} sent {error}") from None
        except RuntimeError as error:
            raise self._members.blame(source, _reason(error, self._limit)) from None

    def wake(self) -> None:
        """Resume the role if it is idle, or waits for a message of any source. May be called from any thread."""
        self._mail.put(None)

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
        """Wait until every message has been read."""
        for destination, under_way in self._sending.items():
            while under_way:
                self._finish(under_way.popleft()[0], destination)
        if self._link is not None:
            self._link.flush()

    def close(self) -> None:
        """Close the connections: the others notice it at once. Messages that have not been read are lost."""
        self._closing = True
        self._sending.clear()
        self._group = None

    def _await(self, wait: Wait) -> Message | None:
        if isinstance(wait, Receive):
            return self.receive(wait.source)
        if isinstance(wait, Idle):
            return self._next_mail(KEEP_ALIVE_SECONDS)
        for source in wait.sources:
            if source not in self._listeners:
                self._listen(source)
        if not wait.wait:
            return self._next_mail(0.0)
        return self._next_mail(KEEP_ALIVE_SECONDS if self._is_front else self._limit)

    def _next_mail(self, seconds: float) -> Message | None:
        """The next message of the sources that are listened to; None if the role is woken, or for none in time.

        Raises:
            TransportError: a source has ended, or the front does not answer within the limit.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                mail = self._mail.get(seconds > 0, min(seconds, KEEP_ALIVE_SECONDS) or None)
                break
            except queue.Empty:
                if not seconds:
                    return None
                self._members.check()  # another rank may have failed: nothing else would tell this one
                if self._is_front:
                    return None
                if time.monotonic() > deadline:
                    raise self._members.blame(0, f"has not answered within {self._limit:g} s") from None
        if isinstance(mail, TransportError):
            raise mail
        return mail

    def _listen(self, source: int) -> None:
        """Receive a source's messages in a thread from now on. Gloo itself cannot be asked whether one has come."""

        def listen() -> None:
            while not self._closing:
                try:
                    message = self.receive(source, UNLIMITED)
                except TransportError as error:
                    self._mail.put(error)
                    return
                self._mail.put(replace(message, tensors=tuple(tensor.clone() for tensor in message.tensors)))
                if message.kind == STOP:
                    return

        thread = self._listeners[source] = threading.Thread(target=listen, name=f"from rank {source}", daemon=True)
        thread.start()

    def _finish(self, work: Any, peer: int, limit: timedelta | None = None) -> None:
        try:
            work.wait(limit or self._wait_limit)
        except RuntimeError as error:
            raise self._members.blame(peer, _reason(error, self._limit)) from None


def _reason(error: RuntimeError, limit: float = 0.0) -> str:
    """The fate of a peer, from gloo's message."""
    text = str(error)
    if "Timed out" in text or "timed out" in text:
        return f"has not answered within {limit:g} s"
    return "has ended" if "closed" in text.lower() or "reset" in text.lower() else f"cannot be reached ({text[:160]})"
