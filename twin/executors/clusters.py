"""Executors on Dask and Ray: workers of our own on this machine, or those of a running cluster.

Points of a sweep share traces and step-time tables, which may have many megabytes. A task's bytes name these parts by
a digest of their content. The cluster's own store brings each part to a worker once, which keeps it unpacked. Tasks go
in a few batches in flight, which are filled up as they come back.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import pickle
import platform
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from latency_models.step_time import StepTime
from scenarios.reading import ImportedPlugin, import_again, imported_plugins
from twin.executors.executor import ExecutorLost
from workloads.errors import BadInput, TwinError, missing_extra
from workloads.trace import Trace

if TYPE_CHECKING:
    from distributed import Client

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


def other_versions(executor: str, actual: str, expected: str, place: str = "") -> BadInput:
    """The refusal of a worker whose versions, or another reason, are not what is expected: what differs, in words."""
    pairs = zip(actual.split(", "), expected.split(", "), strict=False)
    differences = [(there, here) for there, here in pairs if there != here] or [(actual, expected)]
    there, here = (", ".join(texts) for texts in zip(*differences, strict=True))
    text = f"expected workers of the same version as here, found {there} in place of {here}{place}"
    return BadInput(text, field="--executor", value=executor)


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
Result = TypeVar("Result")
Reply = tuple[list[Any], float]
"""The results of a batch, in the order of its tasks, and the seconds of CPU time that it took."""

PROTOCOL = 5

LARGE = 1 << 14
"""Arrays of this many bytes are parts."""

KEPT = 64
"""Parts that a worker keeps unpacked; those that were not used for longest go first."""

SECONDS = 0.25
"""Wanted CPU time of a batch: a batch costs some milliseconds, and what it holds is lost if its worker is."""

LARGEST = 64
"""Tasks of a batch, at most."""

IN_FLIGHT = 2
"""Batches of each worker: one that runs, and one that waits there."""

LAST = 4
"""A batch has at most so small a part of each worker's share of the tasks that are left, so that all end together."""


@dataclass(frozen=True)
class Batch:
    """The pickle of a function and its arguments, for equal versions, with plug-ins to import before."""

    executor: str
    versions: str
    plugins: tuple[ImportedPlugin, ...]
    tasks: bytes


class Cluster(ABC):
    """An executor of batches on workers elsewhere. `name`: the value of `--executor`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: dict[str, Any] = {}  # what `put` gave, by digest
        self._digests: dict[int, tuple[object, str]] = {}  # the object is held, so that its id stays its own

    @abstractmethod
    def workers(self) -> int:
        """The number of worker processes at present."""

    @abstractmethod
    def put(self, digest: str, content: bytes) -> Any:
        """Store the pickle of a part, to be named in `submit`."""

    @abstractmethod
    def submit(self, batch: Batch, parts: dict[str, Any]) -> Future[Reply]:
        """Start `run_batch` on any worker, with what `put` gave of the batch's parts."""

    @abstractmethod
    def reply(self, future: Future[Reply]) -> Reply:
        """The results of a batch that is done; raises what a task raised, or `ExecutorLost`."""

    @abstractmethod
    def drop(self, futures: Iterable[Future[Reply]]) -> None:
        """Forget batches, of which some may have ended."""

    @contextlib.contextmanager
    def each_as_done(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[Iterator[tuple[Task, Result]]]:
        waiting, flying = deque(tasks), dict[Future[Reply], list[Task]]()
        seconds = SECONDS  # of CPU time, of a task

        def fill() -> None:
            workers = self.workers()
            while waiting and len(flying) < IN_FLIGHT * workers:
                share = len(waiting) // (LAST * workers)
                size = max(1, min(int(SECONDS / seconds), share, LARGEST))
                batch = [waiting.popleft() for _ in range(size)]
                flying[self.submit(*self.pack(work, batch))] = batch

        def results() -> Iterator[tuple[Task, Result]]:
            nonlocal seconds
            while flying:
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    batch = flying.pop(future)
                    answers, used = self.reply(future)
                    seconds += 0.3 * (max(used / len(batch), 1e-6) - seconds)
                    fill()  # before the results are worked on
                    yield from zip(batch, answers, strict=True)

        try:
            fill()
            yield results()
        finally:
            self.drop(flying)

    def pack(self, work: Callable[[Task], Any], tasks: Sequence[Task]) -> tuple[Batch, dict[str, Any]]:
        """A batch, and what `put` gave of its parts, by digest."""
        named: dict[str, Any] = {}

        def name(part: object) -> str:
            digest = self._digest(part)
            named[digest] = self.parts[digest]
            return digest

        buffer = io.BytesIO()
        _Pickler(buffer, name).dump((work, tasks))
        return Batch(self.name, versions(), imported_plugins(), buffer.getvalue()), named

    def _digest(self, part: object) -> str:
        if id(part) not in self._digests:
            content = pickle.dumps(part, PROTOCOL)
            digest = hashlib.sha256(content).hexdigest()
            if digest not in self.parts:
                self.parts[digest] = self.put(digest, content)
            self._digests[id(part)] = part, digest
        return self._digests[id(part)][1]


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


PARTS: OrderedDict[str, object] = OrderedDict()
"""The parts of this worker process. A cluster calls functions, and offers no other place to keep something."""

ONE_AT_A_TIME = threading.Lock()
"""Workers may have several threads; a simulation pauses the garbage collector of the whole process."""


class _Unpickler(pickle.Unpickler):
    """Gets parts by their digests from `PARTS`, or else unpacks what `fetch` gives."""

    def __init__(self, content: bytes, fetch: Callable[[str], bytes]) -> None:
        super().__init__(io.BytesIO(content))
        self._fetch = fetch

    def persistent_load(self, pid: Any) -> object:
        if pid not in PARTS:
            PARTS[pid] = pickle.loads(self._fetch(pid))
            if len(PARTS) > KEPT:
                PARTS.popitem(last=False)
        PARTS.move_to_end(pid)
        return PARTS[pid]


def run_batch(batch: Batch, fetch: Callable[[str], bytes]) -> Reply:
    """Run a batch in this worker process; `fetch` gets the pickle of a part by its digest.

    Raises `BadInput` where this process cannot give the same results.
    """
    if batch.versions != versions():
        raise other_versions(batch.executor, versions(), batch.versions)
    with ONE_AT_A_TIME:
        try:
            import_again(batch.plugins)
        except (TwinError, ImportError) as error:
            raise other_versions(batch.executor, str(error), batch.versions) from None
        begin = time.thread_time()
        work, tasks = _Unpickler(batch.tasks, fetch).load()
        results = [work(task) for task in tasks]
        return results, time.thread_time() - begin


CONNECT = 10.0
"""Seconds in which a scheduler answers, and has a worker."""

LOOK_AGAIN = 2.0
"""Seconds after which the workers are counted again, since clusters grow and shrink."""

DASK_SETTINGS = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.large-graph-warning-threshold": "1TB",
}
"""Settings of this process and of workers of our own: Dask's profiler alone takes a sample every 10 ms, and traces may
be large."""

LOGGERS = ("distributed", "distributed.client", "distributed.core", "distributed.nanny", "distributed.scheduler",
           "distributed.worker", "distributed.utils_perf", "bokeh", "tornado")  # fmt: skip


@contextlib.contextmanager
def dask_executor(address: str, jobs: int) -> Iterator[Cluster]:
    """Workers of a scheduler at host:port, or `jobs` processes; `BadInput` without Dask, an answer, or our version."""
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise missing_extra("dask", error, field="--executor") from None
    for name in LOGGERS:  # what the user must know is raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as opened:
        opened.enter_context(dask.config.set(DASK_SETTINGS))
        name = f"dask://{address}" if address else "dask"
        place: Any = f"tcp://{address}"
        if not address:
            quiet: dict[str, Any] = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}  # any free port
            local = LocalCluster(n_workers=jobs, threads_per_worker=1, memory_limit=0, **quiet)
            place = opened.enter_context(local)
        try:
            client = opened.enter_context(contextlib.closing(Client(place, timeout=CONNECT, set_as_default=False)))
            client.wait_for_workers(1, timeout=CONNECT)
        except OSError as error:
            expected = f"expected a Dask scheduler with workers that answers within {CONNECT:g} s: {error}"
            raise BadInput(expected, field="--executor", value=name) from None
        for worker, versions_there in client.run(_find_versions()).items():
            if versions_there != versions():
                raise other_versions(name, versions_there, versions(), f" at {worker}")
        yield _DaskCluster(name, client)


def _find_versions() -> Callable[[], str]:
    """A function that travels by value: a worker may not have this module. Workers that join later check batches."""

    def find() -> str:
        try:
            from twin.executors.clusters import versions
        except ImportError as error:
            return f"no serving-twin with this executor ({error})"
        return versions()

    return find


class _DaskCluster(Cluster):
    """Workers of a Dask scheduler. Parts are results of tasks, which are computed again if their worker ends."""

    def __init__(self, name: str, client: Client) -> None:
        super().__init__(name)
        self._client = client
        self._pool = client.get_executor(pure=False)
        self._workers = 1
        self._counted = -LOOK_AGAIN

    def workers(self) -> int:
        """See `Cluster.workers`. While none is left, one is expected back."""
        if time.monotonic() - self._counted >= LOOK_AGAIN:
            with contextlib.suppress(OSError):  # a scheduler that has gone is noticed by its futures
                self._workers = max(len(self._client.nthreads()), 1)
            self._counted = time.monotonic()
        return self._workers

    def put(self, digest: str, content: bytes) -> Any:
        with self._reached():
            return self._client.submit(bytes, content, key=f"twin-{digest}")

    def submit(self, batch: Batch, parts: dict[str, Any]) -> Future[Reply]:
        with self._reached():
            future: Future[Reply] = self._pool.submit(_run_on_dask, batch, parts)
        return future

    def reply(self, future: Future[Reply]) -> Reply:
        from distributed import KilledWorker

        try:
            return future.result()
        except CancelledError:
            raise self._gone() from None
        except KilledWorker as error:
            ended = f"a task ended {error.allowed_failures + 1} workers, perhaps for lack of memory"
            raise ExecutorLost(f"{self.name}: {ended}") from None

    def drop(self, futures: Iterable[Future[Reply]]) -> None:
        for future in futures if self._client.status == "running" else ():
            with contextlib.suppress(OSError):
                future.cancel()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Say that the scheduler is gone, where a call of the client fails."""
        try:
            yield
        except (OSError, CancelledError, RuntimeError):
            raise self._gone() from None

    def _gone(self) -> ExecutorLost:
        return ExecutorLost(f"{self.name}: the scheduler is gone")


def _run_on_dask(batch: Batch, parts: dict[str, bytes]) -> Reply:
    return run_batch(batch, parts.__getitem__)


@contextlib.contextmanager
def ray_executor(jobs: int) -> Iterator[Cluster]:
    """Workers of the cluster of `RAY_ADDRESS`, or `jobs` processes; `BadInput` without Ray or an answer."""
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", error, field="--executor") from None
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"num_cpus": jobs, "include_dashboard": False}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.CRITICAL, **local)
    except (ConnectionError, RuntimeError) as error:
        expected = f"expected a Ray cluster that answers: {error}"
        raise BadInput(expected, field="--executor", value=f"ray at {address or 'this machine'}") from None
    try:
        yield _RayCluster(ray)
    finally:
        ray.shutdown()


class _RayCluster(Cluster):
    """Workers of Ray. Parts are objects in Ray's store, from which each worker gets those that it lacks."""

    def __init__(self, ray: Any) -> None:
        super().__init__("ray")
        self._ray = ray
        self._run = ray.remote(num_cpus=1, max_retries=3)(_run_on_ray)

    def workers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def put(self, digest: str, content: bytes) -> Any:
        return self._ray.put(content)

    def submit(self, batch: Batch, parts: dict[str, Any]) -> Future[Reply]:
        future: Future[Reply] = self._run.remote(batch, parts).future()
        return future

    def reply(self, future: Future[Reply]) -> Reply:
        from ray.exceptions import RayError, RayTaskError

        try:
            return future.result()
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except RayError as error:
            raise ExecutorLost(f"ray: {str(error).splitlines()[0]}") from None

    def drop(self, futures: Iterable[Any]) -> None:
        for future in futures:
            self._ray.cancel(future.object_ref, force=True)


def _run_on_ray(batch: Batch, parts: dict[str, Any]) -> Reply:
    """Run a batch in a worker process. The parts are references, which are followed where one is missing here."""
    import ray

    return run_batch(batch, lambda digest: ray.get(parts[digest]))
