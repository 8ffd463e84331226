"""Batches in flight, on a cluster of this process that does what a test says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from scenarios.reading import ImportedPlugin
from twin.api.inputs import choose_executor
from twin.executors import shipping
from twin.executors.shipping import IN_FLIGHT, LARGEST, Batch, Cabinet, Cluster, Done, Refused, Reply, run_batch
from workloads.errors import BadInput


class Here(Cluster[int]):
    """Workers that run a batch when its reply is asked for, the last batch first; each task takes `seconds`."""

    name = "here"

    def __init__(self, workers: int = 2, seconds: float = 0.001) -> None:
        super().__init__()
        self.count = workers
        self.seconds = seconds
        self.flying: dict[int, Batch] = {}
        self.submitted: list[Batch] = []
        self.most = 0
        self.supplied: list[str] = []
        self.sizes: list[int] = []

    def workers(self) -> int:
        return self.count

    def submit(self, batch: Batch) -> int:
        self.submitted.append(batch)
        self.flying[len(self.submitted)] = batch
        self.most = max(self.most, len(self.flying))
        return len(self.submitted)

    def next_reply(self) -> tuple[int, Reply]:
        handle, batch = self.flying.popitem()
        reply = run_batch(batch, "w")
        if not isinstance(reply, Done):
            return handle, reply
        self.sizes.append(len(reply.results))
        return handle, Done(reply.results, self.seconds * len(reply.results))

    def supply(self, worker: str, parts: Mapping[str, bytes], plugins: Sequence[ImportedPlugin]) -> None:
        self.supplied += parts
        shipping.store_parts(parts, plugins)

    def drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.flying.pop(handle, None)


def double(number: int) -> int:
    if number < 0:
        raise ValueError(number)
    return 2 * number


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
@pytest.mark.parametrize("seconds", [1e-7, 0.01, 10.0])
def test_each_result_comes_once_with_its_task(count: int, seconds: float) -> None:
    here = Here(seconds=seconds)
    with here.each_as_done(double, list(range(count))) as results:
        result = dict(results)
    assert result == {number: 2 * number for number in range(count)}
    assert here.most <= IN_FLIGHT * here.count
    assert not here.flying


def test_short_tasks_go_in_batches_which_end_small() -> None:
    short, long = Here(seconds=1e-4), Here(seconds=1.0)
    for here in (short, long):
        with here.each_as_done(double, list(range(3000))) as results:
            assert sum(1 for _ in results) == 3000
    assert max(short.sizes) == LARGEST
    assert short.sizes[0] == short.sizes[-1] == 1
    assert long.sizes == [1] * 3000


def test_an_error_of_a_task_drops_the_rest() -> None:
    here = Here()
    tasks = [*range(10), -1, *range(1000)]
    with pytest.raises(ValueError, match="-1"), here.each_as_done(double, tasks) as results:
        list(results)
    assert not here.flying
    with pytest.raises(KeyboardInterrupt), here.each_as_done(double, tasks):
        raise KeyboardInterrupt
    assert not here.flying


def test_parts_are_supplied_again_to_a_worker_that_lost_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr(shipping, "CABINET", Cabinet())
    table = np.arange(5000)
    here = Here(seconds=1.0)
    executor = here
    with executor.each_as_done(sum_of, [(table, number) for number in range(20)]) as results:
        next(results)
        assert len(here.supplied) == 1
        monkeypatch.setattr(shipping, "CABINET", Cabinet())  # as of a worker that was started again
        assert sorted(result for _, result in results)[-1] == table.sum() + 19
    assert len(set(here.supplied)) == 1
    assert len(here.supplied) == 2
    assert len(executor.shipper.parts) == 1


def sum_of(task: tuple[Any, int]) -> int:
    table, number = task
    return int(table.sum()) + number


def test_a_worker_of_another_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here()

    def another_version() -> tuple[int, Reply]:
        return here.flying.popitem()[0], Refused("serving-twin 0.0.1 (12345678)")

    monkeypatch.setattr(here, "next_reply", another_version)
    refused = pytest.raises(BadInput, match=r"--executor: got 'here'.* found serving-twin 0\.0\.1 \(12345678\)")
    with refused, here.each_as_done(double, [1]) as results:
        list(results)


@pytest.mark.parametrize(
    "text", ["", "loc", "dask:", "dask://", "dask://host", "dask://:8786", "local://a:1", "ray://a:1"]
)
def test_another_executor_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"--executor: .*expected local, dask, dask://host:port or ray"):
        choose_executor(text)


def test_jobs_are_for_processes_of_our_own() -> None:
    assert choose_executor("dask", 3).jobs == choose_executor("local", 3).jobs == 3
    assert choose_executor("dask://h:1").address == "h:1"
    with pytest.raises(BadInput, match="--jobs: expected none beside --executor dask://h:1"):
        choose_executor("dask://h:1", 3)
