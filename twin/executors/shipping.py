"""Tasks as bytes for the workers of a cluster, in a few batches in flight that are filled up as they come back.

Points of a sweep share traces and step-time tables, which may have many megabytes. A task's bytes name these parts by
a digest of their content; a worker keeps the parts, and each travels to it once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import platform
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from latency_models.step_time import StepTime
from scenarios.reading import ImportedPlugin, import_again, imported_plugins
from workloads.errors import BadInput, TwinError
from workloads.trace import Trace

PACKAGES = ("workloads", "schedulers", "latency_models", "scenarios", "reports", "twin")
"""The project's packages of which a worker runs something."""

LIBRARIES = ("numpy", "scipy", "simpy", "pydantic")
"""Libraries whose versions may change a result, or the bytes in which a task travels."""


@functools.cache  # the code of a process does not change
def versions() -> str:
    """The version of the project with a digest of its sources, those of libraries, and Python's, in words."""
    package = f"serving-twin {import_module('twin').__version__} ({_digest(_sources())})"
    libraries = (f"{name} {import_module(name).__version__}" for name in LIBRARIES)
    major, minor, _ = platform.python_version_tuple()
    return ", ".join([package, *libraries, f"Python {major}.{minor}"])


def difference(actual: str, expected: str) -> str:
    """Those versions of `actual` that `expected` does not have, beside what is expected in their place, in words."""
    pairs = zip(actual.split(", "), expected.split(", "), strict=False)
    differences = [(one, there) for one, there in pairs if one != there] or [(actual, expected)]
    return f"{', '.join(one for one, _ in differences)} in place of {', '.join(there for _, there in differences)}"


def _sources() -> Iterable[Path]:
    """The modules of the packages. Where they were compiled, their sources stand beside them."""
    for package in PACKAGES:
        folder = Path(str(import_module(package).__file__)).parent
        yield from sorted(folder.rglob("*.py"))


def _digest(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()[:8]


Task = TypeVar("Task")

PROTOCOL = 5

LARGE = 1 << 14
"""Arrays of this many bytes are parts."""

KEPT = 1 << 31
"""Bytes of parts that a worker keeps; those that were not used for longest go first."""


@dataclass(frozen=True)
class Batch:
    """The pickle of a function and its arguments, for equal versions, with plug-ins to import before and its parts."""

    versions: str
    plugins: tuple[ImportedPlugin, ...]
    tasks: bytes
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """The results of a batch, in the order of its tasks. `seconds`: of CPU time that it took."""

    results: list[Any]
    seconds: float


@dataclass(frozen=True)
class Missing:
    """A batch that did not run, since its worker lacks these parts."""

    parts: tuple[str, ...]
    worker: str = ""


@dataclass(frozen=True)
class Refused:
    """A batch that did not run, since its worker cannot give the same results. `found`: in words."""

    found: str


Reply: TypeAlias = Done | Missing | Refused


class Shipper:
    """Packs tasks of one command, and keeps pickles of the parts named so far, by digest."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}
        self._digests: dict[int, tuple[object, str]] = {}  # the object is held, so that its id stays its own

    def pack(self, work: Callable[[Task], Any], tasks: Iterable[Task]) -> Batch:
        named: set[str] = set()
        packed = self._pickle((work, list(tasks)), named)
        return Batch(versions(), imported_plugins(), packed, tuple(sorted(named)))

    def _pickle(self, content: object, named: set[str]) -> bytes:
        """A pickle that has digests in place of parts, which are added to `named`."""

        def name(part: object) -> str:
            digest = self._digest(part)
            named.add(digest)
            return digest

        buffer = io.BytesIO()
        _Pickler(buffer, name).dump(content)
        return buffer.getvalue()

    def _digest(self, part: object) -> str:
        entry = self._digests.get(id(part))
        if entry is not None:
            return entry[1]
        content = pickle.dumps(part, PROTOCOL)
        digest = hashlib.sha256(content).hexdigest()
        self.parts.setdefault(digest, content)
        self._digests[id(part)] = (part, digest)
        return digest


class _Pickler(pickle.Pickler):
    """Has digests in place of parts. `name` gives the digest of a part."""

    def __init__(self, buffer: io.BytesIO, name: Callable[[object], str]) -> None:
        super().__init__(buffer, PROTOCOL)
        self._name = name

    def persistent_id(self, obj: Any) -> str | None:
        kind: type = type(obj)
        is_part = _is_part_by_type(kind)
        return self._name(obj) if is_part or (is_part is None and obj.nbytes >= LARGE) else None


@functools.cache  # a point has some hundred objects of a few types
def _is_part_by_type(kind: type) -> bool | None:
    """True if objects of a type are parts; None where it depends on their size."""
    return None if issubclass(kind, np.ndarray) else issubclass(kind, StepTime | Trace)


class Cabinet:
    """The parts that a worker process keeps, unpacked."""

    def __init__(self, capacity: int = KEPT) -> None:
        self._kept = capacity
        self._parts: OrderedDict[str, tuple[object, int]] = OrderedDict()

    def store(self, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin] = ()) -> None:
        """Keep parts, all of these whatever their size."""
        import_again(plugins)
        for digest, content in parts.items():
            self._parts[digest] = (pickle.loads(content), len(content))
        total = sum(size for _, size in self._parts.values())
        while total > self._kept and len(self._parts) > len(parts):
            _, (_, size) = self._parts.popitem(last=False)
            total -= size

    def missing(self, digests: Iterable[str]) -> tuple[str, ...]:
        return tuple(digest for digest in digests if digest not in self._parts)

    def part(self, digest: str) -> object:
        self._parts.move_to_end(digest)
        return self._parts[digest][0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, cabinet: Cabinet) -> None:
        super().__init__(io.BytesIO(content))
        self._cabinet = cabinet

    def persistent_load(self, pid: Any) -> object:
        return self._cabinet.part(pid)


CABINET = Cabinet()
"""The parts of this worker process. A cluster calls functions, and offers no other place to keep something."""

ONE_AT_A_TIME = threading.Lock()
"""Workers may have several threads; a simulation pauses the garbage collector of the whole process."""


def store_parts(parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin] = ()) -> None:
    with ONE_AT_A_TIME:
        CABINET.store(parts, plugins)


def run_batch(batch: Batch, worker: str = "", fetch: Callable[[str], bytes] | None = None) -> Reply:
    """Run a batch in this worker process; `fetch` gets a part that is not here, else the reply names it."""
    if batch.versions != versions():
        return Refused(versions())
    with ONE_AT_A_TIME:
        try:
            import_again(batch.plugins)
        except (TwinError, ImportError) as error:
            return Refused(str(error))
        if missing := CABINET.missing(batch.parts):
            if fetch is None:
                return Missing(missing, worker)
            CABINET.store({digest: fetch(digest) for digest in missing})
        begin = time.thread_time()
        work, tasks = _Unpickler(batch.tasks, CABINET).load()
        results = [work(task) for task in tasks]
        return Done(results, time.thread_time() - begin)


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


class Cluster(ABC, Generic[Handle]):
    """An executor of batches on workers elsewhere. `name`: the value of `--executor`."""

    name: str

    def __init__(self) -> None:
        self.shipper = Shipper()

    @abstractmethod
    def workers(self) -> int:
        """The number of worker processes at present."""

    @abstractmethod
    def submit(self, batch: Batch) -> Handle:
        """Start a batch on any worker."""

    @abstractmethod
    def next_reply(self) -> tuple[Handle, Reply]:
        """Wait for a batch that was submitted and not dropped; raises what a task raised, or `ExecutorLost`."""

    @abstractmethod
    def supply(self, worker: str, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin]) -> None:
        """Send parts to a worker that misses them; a worker that has gone needs none."""

    @abstractmethod
    def drop(self, handles: Iterable[Handle]) -> None:
        """Forget batches, of which one may have ended in an error."""

    @contextlib.contextmanager
    def each_as_done(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[Iterator[tuple[Task, Result]]]:
        flight = _Flight(self, work, tasks)
        try:
            flight.fill()
            yield flight.results()
        finally:
            self.drop(flight.batches)


class _Flight(Generic[Handle, Task, Result]):
    """The tasks of one block, and the batches in flight, by handle."""

    def __init__(self, cluster: Cluster[Handle], work: Callable[[Task], Result], tasks: Sequence[Task]) -> None:
        self._cluster = cluster
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
            batch = self._cluster.shipper.pack(self._work, tasks)
            self.batches[self._cluster.submit(batch)] = (batch, tasks)

    def results(self) -> Iterator[tuple[Task, Result]]:
        while self.batches:
            handle, reply = self._cluster.next_reply()
            batch, tasks = self.batches.pop(handle)
            if isinstance(reply, Refused):
                expected = f"expected workers of the same version as here, found {difference(reply.found, versions())}"
                raise BadInput(expected, field="--executor", value=self._cluster.name)
            if isinstance(reply, Missing):
                parts = {digest: self._cluster.shipper.parts[digest] for digest in reply.parts}
                self._cluster.supply(reply.worker, parts, batch.plugins)
                self.batches[self._cluster.submit(batch)] = (batch, tasks)
                continue
            self._seconds += 0.3 * (max(reply.seconds / len(tasks), 1e-6) - self._seconds)
            self.fill()  # before the results are worked on
            yield from zip(tasks, reply.results, strict=True)
