"""Executors on Dask and Ray: workers of our own on this machine, or those of a running cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from scenarios.reading import ImportedPlugin
from twin.executors.executor import ExecutorLost
from twin.executors.shipping import Batch, Cluster, Reply, difference, run_batch, store_parts, versions
from workloads.errors import BadInput, missing_extra

if TYPE_CHECKING:
    from distributed import Client, Future

DaskHandle: TypeAlias = "Future[Reply]"

CONNECT = 10.0
"""Seconds in which a scheduler answers, and has a worker."""

LOOK_AGAIN = 2.0
"""Seconds after which the workers are counted again, since clusters grow and shrink."""

LESS_WATCHING = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.system-monitor.gil.enabled": False,
}
"""Settings of this process and of workers of our own: Dask's profiler alone takes a sample every 10 ms."""

LOGGERS = ("distributed", "distributed.client", "distributed.core", "distributed.nanny", "distributed.scheduler",
           "distributed.worker", "distributed.utils_perf", "bokeh", "tornado")  # fmt: skip


@contextlib.contextmanager
def dask_executor(address: str, jobs: int) -> Iterator[Cluster[DaskHandle]]:
    """Workers of a scheduler at host:port, or `jobs` processes; `BadInput` without Dask, an answer, or our version."""
    try:
        import dask
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise missing_extra("dask", error, field="--executor") from None
    for name in LOGGERS:  # what the user must know is raised
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as opened:
        opened.enter_context(dask.config.set(LESS_WATCHING))
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
        _refuse_other_versions(client, name)
        yield _DaskCluster(client, name)


def _refuse_other_versions(client: Client, name: str) -> None:
    """Compare the versions of all workers. Workers that join later say theirs with the first batch."""

    def find() -> str:  # not in a module, so that it travels by value: a worker may not have this module
        try:
            from twin.executors.shipping import versions
        except ImportError as error:
            return f"no serving-twin with this executor ({error})"
        return versions()

    for worker, versions_there in client.run(find).items():
        if versions_there != versions():
            expected = f"expected workers of the same version as here, found {difference(versions_there, versions())}"
            raise BadInput(f"{expected} at {worker}", field="--executor", value=name)


class _DaskCluster(Cluster[DaskHandle]):
    """Workers of a Dask scheduler. Futures come into a queue when they are done, from Dask's own thread."""

    def __init__(self, client: Client, name: str) -> None:
        super().__init__()
        self.name = name
        self._client = client
        self._done: queue.SimpleQueue[DaskHandle] = queue.SimpleQueue()
        self._dropped: set[DaskHandle] = set()
        self._workers = 1
        self._counted = -LOOK_AGAIN

    def workers(self) -> int:
        """See `Cluster.workers`. While none is left, one is expected back."""
        if time.monotonic() - self._counted >= LOOK_AGAIN:
            with contextlib.suppress(OSError):  # a scheduler that has gone is noticed by its futures
                self._workers = max(len(self._client.nthreads()), 1)
            self._counted = time.monotonic()
        return self._workers

    def submit(self, batch: Batch) -> DaskHandle:
        with self._reached():
            future = self._client.submit(_run_on_dask, batch, pure=False)
            future.add_done_callback(self._done.put)
        return future

    def next_reply(self) -> tuple[DaskHandle, Reply]:
        from distributed import KilledWorker

        while True:
            future = self._done.get()
            if future in self._dropped:
                self._dropped.remove(future)
                continue
            with self._reached():
                error = future.exception()
                reply: Reply | None = None if error else future.result()
            if isinstance(error, KilledWorker):
                raise ExecutorLost(
                    f"{self.name}: a task ended {error.allowed_failures + 1} workers, perhaps for lack of memory"
                )
            if reply is None:
                raise error or AssertionError("a future ended with neither a result nor an error")
            return future, reply

    def supply(self, worker: str, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin]) -> None:
        with self._reached():
            self._client.run(store_parts, dict(parts), plugins, workers=[worker], on_error="ignore")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Say that the scheduler is gone, where a call of the client fails. Errors of tasks are values there."""
        from distributed import CancelledError

        try:
            yield
        except (OSError, CancelledError, RuntimeError):
            raise ExecutorLost(f"{self.name}: the scheduler is gone") from None

    def drop(self, handles: Iterable[DaskHandle]) -> None:
        workers = list(handles)
        if workers and self._client.status == "running":
            self._dropped.update(workers)
            with contextlib.suppress(OSError):
                self._client.cancel(workers)


def _run_on_dask(batch: Batch) -> Reply:
    from distributed import get_worker

    return run_batch(batch, get_worker().address)


RayHandle: TypeAlias = Any
"""A Ray object reference."""


@contextlib.contextmanager
def ray_executor(jobs: int) -> Iterator[Cluster[RayHandle]]:
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


class _RayCluster(Cluster[RayHandle]):
    """Workers of Ray. Parts are objects in Ray's store, from which each worker gets those that it lacks."""

    name = "ray"

    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray
        self._run = ray.remote(num_cpus=1, max_retries=3)(_run_on_ray)
        self._parts: dict[str, Any] = {}
        self._waiting: list[RayHandle] = []

    def workers(self) -> int:
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def submit(self, batch: Batch) -> RayHandle:
        for digest in batch.parts:
            if digest not in self._parts:
                self._parts[digest] = self._ray.put(self.shipper.parts[digest])
        handle = self._run.remote(batch, {digest: self._parts[digest] for digest in batch.parts})
        self._waiting.append(handle)
        return handle

    def next_reply(self) -> tuple[RayHandle, Reply]:
        from ray.exceptions import RayError, RayTaskError

        try:
            (handle,), self._waiting = self._ray.wait(self._waiting, num_returns=1)
            return handle, self._ray.get(handle)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except RayError as error:
            raise ExecutorLost(f"ray: {str(error).splitlines()[0]}") from None

    def supply(self, worker: str, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin]) -> None:
        """Never called: workers get parts themselves."""
        raise AssertionError(f"{worker} lacks {list(parts)}")

    def drop(self, handles: Iterable[RayHandle]) -> None:
        for handle in handles:
            if handle in self._waiting:
                self._waiting.remove(handle)
                self._ray.cancel(handle, force=True)


def _run_on_ray(batch: Batch, parts: Mapping[str, Any]) -> Reply:
    """Run a batch in a worker process. The parts are references, which are followed where one is missing here."""
    import ray

    return run_batch(batch, fetch=lambda digest: ray.get(parts[digest]))
