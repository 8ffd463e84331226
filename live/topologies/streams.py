"""Roles of one process on one GPU: a CUDA stream for each, so that the kernels of several run at the same time.

The roles' Python still takes turns. It runs ahead of the device: a role that has launched its kernels waits for its
next message, or for them (`Computing`), while they run, and another role launches its own. Messages are not copied. The
sender's stream records an event, for which the receiver's stream waits, and not the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from live.topologies.local import Handover, Timekeeper
from live.topologies.transport import Message


class RoleStreams(Timekeeper, Handover):
    """The streams of the roles, as the timekeeper and the handover of one network."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._entered: AbstractContextManager[Any] | None = None

    def resume(self, rank: int) -> None:
        self._entered = torch.cuda.stream(self._stream(rank))
        self._entered.__enter__()

    def pause(self, rank: int) -> None:
        assert self._entered is not None, "a role is paused after it was resumed"
        self._entered.__exit__(None, None, None)

    def give(self, message: Message) -> tuple[Message, torch.cuda.Event | None]:
        """The message, and an event behind the kernels that compute its tensors."""
        if not any(tensor.is_cuda for tensor in message.tensors):
            return message, None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream())
        return message, ready

    def take(self, content: tuple[Message, torch.cuda.Event | None]) -> Message:
        """The message; the receiver's next kernels wait for the event."""
        message, ready = content
        if ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(ready)
            for tensor in message.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # its memory is not used again before this stream has read it
        return message

    def _stream(self, rank: int) -> torch.cuda.Stream:
        stream = self._streams.get(rank)
        if stream is None:
            stream = self._streams[rank] = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())  # on which weights and caches were written
        return stream
