"""All roles in one process, one at a time: for tests, one GPU, and machines with fewer cores than workers.

Every message passes through `LocalNetwork`, and every stretch of a role's work runs between two calls of its
`Timekeeper`. So a timekeeper can give each role a clock of its own: it advances by what the role's own work takes, and
a message arrives when it would arrive over a link (`live.topologies.direct_time`).

On a GPU each role of `InProcessWorkers` has a CUDA stream (`RoleStreams`), so that their kernels overlap. On a CPU the
workers take turns, and nothing overlaps.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from live.device import freeze_loaded_objects
from live.generation import Generation
from live.loaded_model import Models, SharedModels
from live.topologies.deployment import Deployment, OnProgress
from live.topologies.transport import (
    Computing,
    Forms,
    Idle,
    Message,
    Receive,
    ReceiveAny,
    Role,
    Transport,
    TransportError,
    Wait,
    check_message,
    pack,
    unpack,
)


class Timekeeper:
    """The clock on the wall for all roles, by rank, in seconds: messages arrive at once, and roles take turns."""

    def now(self, rank: int) -> float:
        """A role's time."""
        return time.perf_counter()

    def resume(self, rank: int) -> None:
        """A role's work goes on."""

    def pause(self, rank: int) -> None:
        """A role waits."""

    def arrival(self, source: int, destination: int, message: Message) -> float:
        """When a message arrives that a role sends now."""
        return time.perf_counter()

    def receive(self, rank: int, arrival: float) -> None:
        """A role takes a message that arrived at this time."""

    def wait_until(self, rank: int, moment: float) -> None:
        """A role that waits is reached from outside at this time."""

    def first(self, ready: Mapping[int, float]) -> int:
        """The first of the roles that are ready, given by rank with their messages' arrivals (-inf: none)."""
        return next(iter(ready))


class Handover:
    """The way of a message from one role to another in this process: the receiver gets the sender's tensors."""

    def give(self, message: Message) -> Any:
        """The message as it is kept on its way; called while the sender runs."""
        return message

    def take(self, content: Any) -> Message:
        """The message again; called while the receiver runs."""
        return content  # type: ignore[no-any-return]


class PackedMessages(Handover):
    """Messages are packed by the sender and unpacked by the receiver, as between processes: it counts as their work."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms

    def give(self, message: Message) -> torch.Tensor:
        return pack(message)

    def take(self, content: torch.Tensor) -> Message:
        return unpack(content, self._forms)


class _InTransit(NamedTuple):
    arrival: float
    source: int
    content: Any


class LocalTransport:
    """One role's side of a `LocalNetwork`, as `Transport`."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        self.rank = rank
        self._network = network

    def send(self, destination: int, message: Message) -> None:
        self._network.post(self.rank, destination, message)

    def clock(self) -> float:
        return self._network.timekeeper.now(self.rank)


class LocalNetwork:
    """Runs roles in turns and carries their messages; without a handover the receiver gets the sender's tensors."""

    def __init__(self, forms: Forms, timekeeper: Timekeeper | None = None, handover: Handover | None = None) -> None:
        self.timekeeper = timekeeper or Timekeeper()
        self._forms = forms
        self._handover = handover or Handover()
        self._mail: dict[tuple[int, int], deque[_InTransit]] = {}
        self._outside: dict[int, deque[tuple[float, Callable[[], None]]]] = {}
        self._roles: dict[int, Role] = {}
        self._waits: dict[int, Wait] = {}  # of the roles that wait, the longest first

    def transport(self, rank: int) -> LocalTransport:
        """The side of one role."""
        return LocalTransport(self, rank)

    def post(self, source: int, destination: int, message: Message) -> None:
        """Put a message in the mail."""
        check_message(message, self._forms)
        content = self._handover.give(message)
        arrival = self.timekeeper.arrival(source, destination, message)
        self._mail.setdefault((source, destination), deque()).append(_InTransit(arrival, source, content))

    def at(self, rank: int, moment: float, action: Callable[[], None]) -> None:
        """Resume a role with None at a time of its clock, as a request does; call it in the order of these times."""
        self._outside.setdefault(rank, deque()).append((moment, action))

    @torch.inference_mode()
    def start(self, roles: Mapping[int, Role]) -> None:
        """Run each role, by rank, until it first waits."""
        for rank, role in roles.items():
            self._roles[rank] = role
            self._go_on(rank, None)

    def run(self) -> None:
        """Run until every role has ended, or is idle or waits for one that is."""
        while not self.run_some(1024):
            pass

    @torch.inference_mode()
    def run_some(self, turns: int) -> bool:
        """Resume roles this many times; returns whether there is nothing left to run."""
        for _ in range(turns):
            ready = self._ready() or self._computed()
            if not ready:
                break
            rank = self.timekeeper.first(ready)
            self._go_on(rank, self._take(rank, self._waits[rank]))
        else:
            return False
        if self._waits and not any(isinstance(wait, Idle) for wait in self._waits.values()):
            waits = "; ".join(f"rank {rank} for {wait}" for rank, wait in self._waits.items())
            raise TransportError(f"roles wait for one another: {waits}")
        return True

    @torch.inference_mode()
    def wake(self, rank: int) -> None:
        """Resume a role that is idle."""
        if isinstance(self._waits.get(rank), Idle):
            self._go_on(rank, None)

    @property
    def ended(self) -> bool:
        """True when every role has ended."""
        return not self._waits

    def _go_on(self, rank: int, content: Any) -> None:
        self._waits.pop(rank, None)
        self.timekeeper.resume(rank)
        try:
            message = None if content is None else self._handover.take(content)
            self._waits[rank] = self._roles[rank].send(message)
        except StopIteration:
            del self._roles[rank]
        finally:
            self.timekeeper.pause(rank)

    def _ready(self) -> dict[int, float]:
        """The roles that can go on, each with the arrival of the message that it takes."""
        ready = {}
        for rank, wait in self._waits.items():
            if isinstance(wait, Computing):
                if wait.done():
                    ready[rank] = -math.inf
            elif isinstance(wait, ReceiveAny) and not wait.wait:
                ready[rank] = -math.inf
            else:
                moments = [queue[0].arrival for queue in self._queues(rank, wait)]
                if self._outside.get(rank) and not isinstance(wait, Receive):
                    moments.append(self._outside[rank][0][0])
                if moments:
                    ready[rank] = min(moments)
        return ready

    def _computed(self) -> dict[int, float]:
        """Wait for the kernels of the role that has waited longest. Empty if no role's kernels run."""
        for rank, wait in self._waits.items():
            if isinstance(wait, Computing):
                wait.wait()
                return {rank: -math.inf}
        return {}

    def _queues(self, rank: int, wait: Wait) -> list[deque[_InTransit]]:
        sources = (wait.source,) if isinstance(wait, Receive) else getattr(wait, "sources", ())
        return [queue for source in sources if (queue := self._mail.get((source, rank)))]

    def _take(self, rank: int, wait: Wait) -> Any:
        """The message that a role waits for, in the handover's form; None for one that did not want to wait."""
        if isinstance(wait, Computing):
            return None
        queues = self._queues(rank, wait)
        if isinstance(wait, ReceiveAny) and not wait.wait:
            now = self.timekeeper.now(rank)
            queues = [queue for queue in queues if queue[0].arrival <= now]
        outside = self._outside.get(rank)
        if outside and not isinstance(wait, Receive):
            moment, action = outside[0]
            if all(moment <= queue[0].arrival for queue in queues):
                outside.popleft()
                self.timekeeper.wait_until(rank, moment)
                action()
                return None
        if not queues:
            return None
        transit = min(queues, key=lambda queue: queue[0][:2]).popleft()
        self.timekeeper.receive(rank, transit.arrival)
        return transit.content


class LocalTopology:
    """A topology whose roles all run in this process, with one copy of each model.

    `packed`: messages are packed as between processes, in place of a handover.
    """

    def __init__(
        self,
        deployment: Deployment,
        models: Models | None = None,
        on_progress: OnProgress = lambda progress: None,
        *,
        timekeeper: Timekeeper | None = None,
        handover: Handover | None = None,
        packed: bool = False,
    ) -> None:
        forms, models = deployment.forms(), models or SharedModels()
        self.network = LocalNetwork(forms, timekeeper, PackedMessages(forms) if packed else handover)
        transport = self.network.transport
        self.front: Any = deployment.front(transport(0), on_progress)
        ranks = range(1, len(deployment.names))
        self.workers: list[Any] = [deployment.load(rank, models)(transport(rank)) for rank in ranks]
        self.network.start({rank: role.run() for rank, role in enumerate([self.front, *self.workers])})

    def submit(self, generation: Generation) -> None:
        self.front.submit(generation)

    def run(self) -> None:
        """Run until all requests are finished."""
        self.network.wake(0)
        self.network.run()

    def stop(self) -> None:
        """Abort all requests and end the workers; again it changes nothing."""
        self.front.stop()
        self.run()


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
        ranks = range(1, len(deployment.names))
        streams = RoleStreams() if deployment.device != "cpu" else None
        self._network = LocalNetwork(deployment.forms(), streams, streams)
        self.transport: Transport = self._network.transport(0)
        models = SharedModels()
        make = {rank: deployment.load(rank, models) for rank in ranks}
        with torch.inference_mode():
            self._roles = {rank: make[rank](self._network.transport(rank)).run() for rank in ranks}
        self._woken = threading.Event()
        self._disconnected = False
        freeze_loaded_objects()

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
