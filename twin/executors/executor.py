"""The protocol of executors, and the choice of one by the value of `--executor`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from twin import process
from twin.executors import processes
from workloads.errors import BadInput

Task = TypeVar("Task")
Result = TypeVar("Result")

KINDS = "local, dask, dask://host:port or ray"


class Executor(Protocol):
    """Runs independent tasks somewhere."""

    def each_as_done(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> AbstractContextManager[Iterator[tuple[Task, Result]]]:
        """Start the tasks in the order given; yields (task, result) in order of completion, and drops unfinished ones.

        `work`: a function of a module, which depends on nothing but its argument. Raises what a task raised when its
        result is asked for, and `ExecutorLost` where the executor, or every worker that runs a task, is gone.
        """


@dataclass(frozen=True)
class ExecutorChoice:
    """A checked choice of an executor, which starts nothing; `address`: of a Dask scheduler, "" for own workers."""

    kind: str
    address: str
    jobs: int

    @contextlib.contextmanager
    def start(self) -> Iterator[Executor]:
        """Start the executor, or connect to it, until the end of the block; `BadInput` if that fails."""
        if self.kind == "dask":
            from twin.executors.clusters import dask_executor

            with dask_executor(self.address, self.jobs) as on_dask:
                yield on_dask
        elif self.kind == "ray":
            from twin.executors.clusters import ray_executor

            with ray_executor(self.jobs) as on_ray:
                yield on_ray
        else:
            yield processes.Processes(self.jobs)


def choose_executor(text: str = "local", jobs: int | None = None) -> ExecutorChoice:
    """The executor that `--executor` and `--jobs` ask for; `BadInput` for an unknown one, or jobs of a cluster."""
    if not isinstance(text, str):
        raise BadInput(f"expected {KINDS}", field="--executor", value=text)
    kind, _, address = text.partition("://")
    host, _, port = address.rpartition(":")
    if kind not in ("local", "dask", "ray") or ("://" in text and (kind != "dask" or not host or not port.isdecimal())):
        raise BadInput(f"expected {KINDS}", field="--executor", value=text)
    if address and jobs is not None:
        raise BadInput(f"expected none beside --executor {text}, which has workers of its own", field="--jobs")
    return ExecutorChoice(kind, address, jobs or process.usable_cores())
