"""An executor on Ray: the cluster that the environment names (`RAY_ADDRESS`), or processes of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from scenarios.reading import ImportedPlugin
from twin.executors.batches import OnCluster
from twin.executors.processes import ExecutorLost
from twin.executors.shipping import Batch, Reply, Shipper, run_batch
from workloads.errors import BadInput, missing_extra

Handle: TypeAlias = Any
"""A Ray object reference."""


@contextlib.contextmanager
def ray_executor(jobs: int) -> Iterator[OnCluster[Handle]]:
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
        shipper = Shipper()
        yield OnCluster(_RayCluster(shipper), shipper)
    finally:
        ray.shutdown()


class _RayCluster:
    """Workers of Ray. Parts are objects in Ray's store, from which each worker gets those that it lacks."""

    name = "ray"

    def __init__(self, shipper: Shipper) -> None:
        import ray

        self._shipper = shipper
        self._run = ray.remote(num_cpus=1, max_retries=3)(_run_here)
        self._parts: dict[str, Any] = {}
        self._waiting: list[Handle] = []

    def workers(self) -> int:
        import ray

        return max(int(ray.cluster_resources().get("CPU", 1)), 1)

    def submit(self, batch: Batch) -> Handle:
        import ray

        for digest in batch.parts:
            if digest not in self._parts:
                self._parts[digest] = ray.put(self._shipper.parts[digest])
        handle = self._run.remote(batch, {digest: self._parts[digest] for digest in batch.parts})
        self._waiting.append(handle)
        return handle

    def next_reply(self) -> tuple[Handle, Reply]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            (handle,), self._waiting = ray.wait(self._waiting, num_returns=1)
            return handle, ray.get(handle)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except RayError as error:
            raise ExecutorLost(f"ray: {str(error).splitlines()[0]}") from None

    def supply(self, worker: str, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin]) -> None:
        """Never called: workers get parts themselves."""
        raise AssertionError(f"{worker} lacks {list(parts)}")

    def drop(self, handles: Iterable[Handle]) -> None:
        import ray

        for handle in handles:
            if handle in self._waiting:
                self._waiting.remove(handle)
                ray.cancel(handle, force=True)


def _run_here(batch: Batch, parts: Mapping[str, Any]) -> Reply:
    """Run a batch in a worker process. The parts are references, which are followed where one is missing here."""
    import ray

    return run_batch(batch, fetch=lambda digest: ray.get(parts[digest]))
