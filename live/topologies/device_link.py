"""Tensors sent from one worker's device to another's, beside the headers that go through the host.

On GPUs the process groups are NCCL's. A send starts when the kernels that compute its tensors have ended, and a receive
as soon as it is called: both run on streams of their own, beside the worker's next kernels. The host waits for neither.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from live.topologies.membership import Address, Membership, listen_at
from live.topologies.transport import Payload

OUTSTANDING = 16
"""Sends to one destination that may be under way at a time."""

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
