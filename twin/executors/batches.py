"""Tasks on a cluster: a few batches in flight, filled up as they come back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from scenarios.reading import ImportedPlugin
from twin.executors.shipping import Batch, Done, Missing, Refused, Reply, Shipper, difference, versions
from workloads.errors import BadInput

Task = TypeVar("Task")
Result = TypeVar("Result")
Handle = TypeVar("Handle")

SECONDS = 0.25
"""Wanted CPU time of a batch: a batch costs some milliseconds, and what it holds is lost if its worker is."""

LARGEST = 64
"""Tasks of a batch, at most."""

IN_FLIGHT = 2
"""Batches of each worker: one that runs, and one that waits there."""

LAST = 4
"""A batch has at most so small a part of each worker's share of the tasks that are left, so that all end together."""


class Cluster(Protocol[Handle]):
    """Workers elsewhere."""

    name: str
    """The value of `--executor`."""

    def workers(self) -> int:
        """The number of worker processes at present."""

    def submit(self, batch: Batch) -> Handle:
        """Start a batch on any worker."""

    def next_reply(self) -> tuple[Handle, Reply]:
        """Wait for a batch that was submitted and not dropped; raises what a task raised, or `ExecutorLost`."""

    def supply(self, worker: str, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin]) -> None:
        """Send parts to a worker that misses them; a worker that has gone needs none."""

    def drop(self, handles: Iterable[Handle]) -> None:
        """Forget batches, of which one may have ended in an error."""


@dataclass
class OnCluster(Generic[Handle]):
    """An executor of batches on a cluster."""

    cluster: Cluster[Handle]
    shipper: Shipper = field(default_factory=Shipper)

    @contextlib.contextmanager
    def each_as_done(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[Iterator[tuple[Task, Result]]]:
        flight = _Flight(self.cluster, self.shipper, work, tasks)
        try:
            flight.fill()
            yield flight.results()
        finally:
            self.cluster.drop(flight.batches)


class _Flight(Generic[Handle, Task, Result]):
    """The tasks of one block, and the batches in flight, by handle."""

    def __init__(
        self, cluster: Cluster[Handle], shipper: Shipper, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> None:
        self._cluster = cluster
        self._shipper = shipper
        self._work = work
        self._waiting = deque(tasks)
        self._seconds = SECONDS  # of CPU time, of a task
        self.batches: dict[Handle, tuple[Batch, list[Task]]] = {}

    def fill(self) -> None:
        """Submit batches until there are enough in flight."""
        workers = self._cluster.workers()
        while self._waiting and len(self.batches) < IN_FLIGHT * workers:
            share = len(self._waiting) // (LAST * workers)
            size = max(1, min(int(SECONDS / self._seconds), share, LARGEST))
            tasks = [self._waiting.popleft() for _ in range(size)]
            batch = self._shipper.pack(self._work, tasks)
            self.batches[self._cluster.submit(batch)] = (batch, tasks)

    def results(self) -> Iterator[tuple[Task, Result]]:
        while self.batches:
            handle, reply = self._cluster.next_reply()
            batch, tasks = self.batches.pop(handle)
            if isinstance(reply, Refused):
                expected = f"expected workers of the same version as here, found {difference(reply.found, versions())}"
                raise BadInput(expected, field="--executor", value=self._cluster.name)
            if isinstance(reply, Missing):
                parts = {digest: self._shipper.parts[digest] for digest in reply.parts}
                self._cluster.supply(reply.worker, parts, batch.plugins)
                self.batches[self._cluster.submit(batch)] = (batch, tasks)
                continue
            self._note_duration(reply, len(tasks))
            self.fill()  # before the results are worked on
            yield from zip(tasks, reply.results, strict=True)

    def _note_duration(self, reply: Done, tasks: int) -> None:
        self._seconds += 0.3 * (max(reply.seconds / tasks, 1e-6) - self._seconds)
