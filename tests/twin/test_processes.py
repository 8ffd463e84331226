"""Tasks over processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from twin.executors.executor import Processes


class Task:
    """One number of a table that the tasks share."""

    def __init__(self, number: int, table: dict[int, Any]) -> None:
        self.number = number
        self.table = table

    def __getstate__(self) -> dict[str, object]:
        # In another thread it would read the table while the block fills it.
        assert threading.current_thread() is threading.main_thread()
        return self.__dict__


def look_up(task: Task) -> tuple[int, Any]:
    return task.number, task.table[task.number]


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_result_comes_with_its_task(jobs: int) -> None:
    table = {number: number**2 for number in range(20)}
    tasks = [Task(number, table) for number in table]
    with Processes(jobs).each_as_done(look_up, tasks) as results:
        results_by_task = {task: result for task, result in results}
    assert results_by_task == {task: (task.number, task.number**2) for task in tasks}


def test_the_block_may_change_what_tasks_refer_to_while_workers_run() -> None:
    table = dict.fromkeys(range(40), "as it was")
    tasks = [Task(number, table) for number in table]
    with Processes(2).each_as_done(look_up, tasks) as results:
        table[0] = "changed"
        assert sorted(result for _, result in results) == [(number, "as it was") for number in range(40)]


def _fail(task: int) -> None:
    raise ValueError(task)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_task_raised_is_raised_when_its_result_is_asked_for(jobs: int) -> None:
    with Processes(jobs).each_as_done(_fail, [1, 2]) as results, pytest.raises(ValueError, match=r"^[12]$"):
        next(results)
