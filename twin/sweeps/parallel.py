"""Run independent tasks over processes and hand back each result as it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # a single run needs no processes, and would wait for these to load
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.context import BaseContext

Task = TypeVar("Task")
Result = TypeVar("Result")


def each_as_done(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Result]]:
    """Start the tasks in the order given and yield (task, result) in order of completion.

    Processes are at work from the call on, before the first result is asked for. With one job or one task none is
    started. An error in a task is raised when its turn comes, and what has not begun by then is dropped.
    """
    if jobs == 1 or len(tasks) <= 1:
        return ((task, work(task)) for task in tasks)
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=_context())
    return _collect(pool, {pool.submit(work, task): task for task in tasks})


def _collect(pool: ProcessPoolExecutor, pending: dict[Future[Result], Task]) -> Iterator[tuple[Task, Result]]:
    from concurrent.futures import as_completed

    try:
        for future in as_completed(pending):
            yield pending[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _context() -> BaseContext:
    """Fork where that is safe: workers then start with everything loaded, in milliseconds."""
    import multiprocessing

    return multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
