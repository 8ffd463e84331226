"""What executors do, and the one on this machine, which runs independent tasks in several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from workloads.errors import TwinError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


Task = TypeVar("Task")
Result = TypeVar("Result")


class ExecutorLost(TwinError):
    """The executor is gone, or a task ends every worker that runs it. Results that have come back by then are kept."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the same command, with any executor, goes on from the results that are kept")


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
class Processes:
    """Processes of this machine, as many as there are jobs, started for each set of tasks.

    They end with the block, or with this process, however it ends. With one job or one task there are none, and each
    task runs when its result is asked for. Workers take the tasks with them when they start, so the block may change
    what a task refers to.
    """

    jobs: int

    @contextlib.contextmanager
    def each_as_done(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[Iterator[tuple[Task, Result]]]:
        if self.jobs == 1 or len(tasks) <= 1:
            yield ((task, work(task)) for task in tasks)
            return
        from concurrent.futures import ProcessPoolExecutor, as_completed
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        # Fork where that is safe: workers then start with everything loaded, in milliseconds.
        context = get_context("fork" if sys.platform == "linux" else "spawn")
        # Only this process holds the writing end: the reading end becomes ready when it closes that, or is killed.
        parent_gone, parent_end = context.Pipe(duplex=False)
        # Submitted tasks would be pickled later, in a thread, while the block fills the caches of what they refer to.
        shared = (work, tasks, parent_gone, parent_end)
        pool = ProcessPoolExecutor(min(self.jobs, len(tasks)), context, _start_worker, shared)
        try:
            pending = {pool.submit(_work_on, index): task for index, task in enumerate(tasks)}
            yield ((pending[future], future.result()) for future in as_completed(pending))
        except BrokenProcessPool:
            raise ExecutorLost("a worker process was ended from outside, perhaps for lack of memory") from None
        finally:
            parent_end.close()
            parent_gone.close()
            pool.shutdown()


_work: Callable[[Any], Any]
_tasks: Sequence[Any]


def _start_worker(
    work: Callable[[Task], Any], tasks: Sequence[Task], parent_gone: Connection, parent_end: Connection
) -> None:
    """Keep the tasks, and end with the parent: when no process holds the pipe's other end.

    Ctrl-C is left to the parent, whose SIGTERM handler is undone.
    """
    global _work, _tasks
    _work, _tasks = work, tasks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent_end.close()
    threading.Thread(target=_wait_and_exit, args=(parent_gone,), daemon=True).start()


def _wait_and_exit(parent_gone: Connection) -> None:
    parent_gone.poll(None)
    os._exit(1)


def _work_on(index: int) -> Any:
    return _work(_tasks[index])
