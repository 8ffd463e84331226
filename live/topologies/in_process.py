"""All workers of a topology in the server's process, one at a time: for one GPU, and for machines with few cores.

On a GPU each role has a CUDA stream (`RoleStreams`), so that their kernels overlap. On a CPU the workers
take turns, and nothing overlaps.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from live.loaded_model import SharedModels
from live.memory import freeze_loaded_objects
from live.topologies.deployment import Deployment
from live.topologies.local import Handover, LocalNetwork, Timekeeper
from live.topologies.transport import Message, Role, Transport, TransportError


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


class InProcessWorkers:
    """The workers of a topology in this process, which share weights, and the means to drive the front's role."""

    def __init__(self, deployment: Deployment) -> None:
        self._ranks = range(1, len(deployment.names))
        streams = RoleStreams() if deployment.device != "cpu" else None
        self._network = LocalNetwork(deployment.forms(), streams, streams)
        self._transport = self._network.transport(0)
        models = SharedModels()
        make = {rank: deployment.load(rank, models) for rank in self._ranks}
        with torch.inference_mode():
            self._roles = {rank: make[rank](self._network.transport(rank)) for rank in self._ranks}
        self._woken = threading.Event()
        self._disconnected = False
        freeze_loaded_objects()

    @property
    def transport(self) -> Transport:
        return self._transport

    def run(self, role: Role) -> None:
        self._network.start({0: role, **self._roles})
        while not self._disconnected:
            self._network.run()
            if self._network.ended:
                return
            self._woken.wait()
            self._woken.clear()
            self._network.wake(0)

    def wake(self) -> None:
        self._woken.set()

    def fail(self, reason: str) -> TransportError:
        return TransportError(reason)

    def disconnect(self) -> None:
        self._disconnected = True
        self._woken.set()

    def close(self) -> None:
        """Nothing: the workers end with the role that drives them."""
