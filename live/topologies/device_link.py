"""Tensors sent from one worker's device to another's, beside the headers that go through the host.

On GPUs the process groups are NCCL's. A send starts when the kernels that compute its tensors have ended, and a receive
as soon as it is called: both run on streams of their own, beside the worker's next kernels. The host waits for neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from live.topologies.transport import Payload

OUTSTANDING = 16
"""Sends to one destination that may be under way at a time."""

TAG = 1


@dataclass
class _Source:
    """The buffers for messages of one source, two by turns: one is read while the next message arrives.

    Attributes:
        stream: that receives; None on a CPU. read: an event behind the kernels that were launched before the latest
            receive: all readers of the other buffers are among them.
    """

    buffers: list[dict[int, torch.Tensor]] = field(default_factory=lambda: [{}, {}])
    stream: Any = None
    read: Any = None


class DeviceLink:
    """One worker's side.

    There are two process groups, since a group's operations between two ranks run in the order of their calls: in one
    group, a send to a peer could wait for a receive that the peer calls only after this one has received.

    Args:
        upwards, downwards: the groups of all workers for messages to higher and to lower ranks.
        limit: of any wait of a CPU. device: the worker's.
    """

    def __init__(self, rank: int, upwards: Any, downwards: Any, limit: timedelta, device: torch.device) -> None:
        self._rank, self._upwards, self._downwards = rank, upwards, downwards
        self._limit, self._device = limit, device
        self._on_gpu = device.type == "cuda"
        self._sources: dict[int, _Source] = {}
        self._sending: dict[int, deque[tuple[Any, torch.Tensor]]] = {}

    def send(self, destination: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, of which those without elements are not sent.

        Raises:
            RuntimeError: the destination has ended, or on a CPU does not read.
        """
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
        """Receive tensors: (place in the message, payload, rows) of each. They are valid until the next call.

        Raises:
            RuntimeError: the source has ended, or on a CPU does not send.
        """
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
        """Memory for the rows of a message's tensor, as large as any message needs."""
        found = buffers.get(place)
        if found is None or found.dtype != payload.dtype or found.shape[1:] != payload.row:
            found = buffers[place] = torch.empty((payload.rows, *payload.row), dtype=payload.dtype, device=self._device)
        return found[:rows]

    def _receiving(self, place: _Source) -> AbstractContextManager[Any]:
        """The stream on which to receive into the buffers whose turn it is, when these have been read."""
        if not self._on_gpu:
            return nullcontext()
        if place.read is not None:
            place.stream.wait_event(place.read)
        place.read = torch.cuda.current_stream().record_event()
        return torch.cuda.stream(place.stream)

    def _finish(self, work: Any) -> None:
        """Wait for an operation: on a GPU the current stream waits, and not the host."""
        if self._on_gpu:
            work.wait()
        else:
            work.wait(self._limit)


def device_link(rank: int, make_group: Callable[[str], Any], seconds: float, device: str) -> DeviceLink:
    """One worker's side. `make_group`: makes a process group, by the name under which its members meet."""
    limit = timedelta(seconds=seconds)
    return DeviceLink(rank, make_group("upwards"), make_group("downwards"), limit, torch.device(device))
