"""Work that a paper's program hands to other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twin.executors.processes import each_as_done


@dataclass(frozen=True, eq=False)
class Task:
    """A function of a module with its arguments, and a name for progress."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> Any:
        return self.function(*self.arguments)


def run_tasks(tasks: Sequence[Task], jobs: int, progress: Callable[[str], None]) -> list[Any]:
    """The tasks' results, in the order of the tasks; `progress` is called with every task that ends."""
    results: dict[Task, Any] = {}
    with each_as_done(Task.run, tasks, jobs) as pairs:
        for task, result in pairs:
            results[task] = result
            progress(f"{task.name} ({len(results)} of {len(tasks)})")
    return [results[task] for task in tasks]
