"""Batches in flight on a cluster of this process, and what its worker does with them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scenarios.reading import ImportedPlugin, import_again, imported_plugins, read_scenario
from scenarios.serving import ServingWorkloadSpec
from twin.api.inputs import choose_executor
from twin.executors import clusters
from twin.executors.clusters import IN_FLIGHT, LARGEST, Batch, Cluster, Reply, run_batch, versions
from twin.sweeps.serving_sweep import ServingSweep, prepare, run_task
from workloads.errors import BadInput, TwinError
from workloads.trace import Trace

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ("tiny-llama-cpu", "pd-tiny-cpu", "prelude-judges", "chat-sessions", "spear-slo", "roofline-h200-llama-70b")


@pytest.fixture(autouse=True)
def _no_parts() -> None:
    clusters.PARTS.clear()


class Here(Cluster):
    """Workers that run a batch at once; each task takes `seconds`."""

    def __init__(self, workers: int = 2, seconds: float = 0.001) -> None:
        super().__init__("here")
        self.count = workers
        self.seconds = seconds
        self.flying = 0
        self.most = 0
        self.sizes: list[int] = []
        self.fetched: list[str] = []

    def workers(self) -> int:
        return self.count

    def put(self, digest: str, content: bytes) -> bytes:
        return content

    def submit(self, batch: Batch, parts: dict[str, Any]) -> Future[Reply]:
        def fetch(digest: str) -> bytes:
            self.fetched.append(digest)
            content: bytes = parts[digest]
            return content

        future: Future[Reply] = Future()
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            results, _ = run_batch(batch, fetch)
            future.set_result((results, self.seconds * len(results)))
        except Exception as error:
            future.set_exception(error)
        return future

    def reply(self, future: Future[Reply]) -> Reply:
        self.flying -= 1
        self.sizes.append(len(future.result()[0]))
        return future.result()

    def drop(self, futures: Iterable[Future[Reply]]) -> None:
        self.flying -= len(list(futures))


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
    assert here.flying == 0


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
    assert here.flying == 0
    with pytest.raises(KeyboardInterrupt), here.each_as_done(double, tasks):
        raise KeyboardInterrupt
    assert here.flying == 0


def sum_of(task: tuple[Any, int]) -> int:
    table, number = task
    return int(table.sum()) + number


def test_a_worker_fetches_each_part_once_and_again_when_it_has_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "KEPT", 2)
    here, tables = Here(seconds=1.0), [np.full(5000, number) for number in range(3)]
    tasks = [(table, number) for table in tables for number in range(20)]
    with here.each_as_done(sum_of, tasks) as results:
        assert {(int(task[0][0]), task[1]): result for task, result in results} == {
            (value, number): 5000 * value + number for value in range(3) for number in range(20)
        }
    assert here.fetched == list(here.parts)
    assert list(clusters.PARTS) == here.fetched[1:]
    clusters.PARTS.clear()  # as of a worker that was started again
    with here.each_as_done(sum_of, tasks[:3]) as results:
        assert sum(result for _, result in results) == 3
    assert here.fetched[3:] == here.fetched[:1]


def sweep_of(name: str, *settings: dict[str, Any]) -> ServingSweep:
    path = ROOT / "examples" / f"{name}.yaml"
    fewer = {"workload.requests": 60}
    return prepare(read_scenario(path, "serving"), path, [{**fewer, **item} for item in settings or ({},)])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_shipped_point_has_the_same_bytes(name: str) -> None:
    tasks = sweep_of(name).tasks
    with Here().each_as_done(run_task, tasks) as results:
        ((task, result),) = results
    assert json.dumps(result) == json.dumps(run_task(task))


def test_step_times_travel_once_for_all_points() -> None:
    tasks = sweep_of("tiny-llama-cpu", *({"engine.max_num_seqs": size} for size in range(1, 21))).tasks
    here = Here()
    batches = [here.pack(run_task, [task])[0] for task in tasks]
    (tables,) = here.parts.values()
    assert max(len(batch.tasks) for batch in batches) < 5000 < len(tables)
    together, parts = here.pack(run_task, tasks)
    assert parts == here.parts
    assert len(together.tasks) < sum(len(batch.tasks) for batch in batches) / 2


def test_the_columns_of_a_trace_travel_once_whatever_is_made_of_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    trace = Trace("t", np.sort(rng.random(5000)), rng.integers(1, 99, 5000), rng.integers(1, 99, 5000))
    tasks = []
    for rate in (1.0, 2.0):
        spec = ServingWorkloadSpec.model_validate(
            {"trace": {"path": "t", "format": "plain"}, "arrivals": {"process": "poisson", "rate": rate}}
        )
        tasks.append(spec.build(trace))
    batch, parts = Here().pack(len, [*tasks, trace])
    assert len(parts) == 3  # prompts, answers, and the trace
    assert len(batch.tasks) < 3000
    workload = clusters._Unpickler(batch.tasks, parts.__getitem__).load()[1][0]
    original, same = (list(source.requests(np.random.default_rng(1), 50)) for source in (workload, tasks[0]))
    assert original == same


def test_a_worker_of_another_version_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    here = versions()
    name, _, number = next(part for part in here.split(", ") if part.startswith("numpy")).partition(" ")
    batch = Batch("here", here.replace("numpy ", "numpy 0."), (), b"")
    expected = f"expected workers of the same version as here, found {name} {number} in place of {name} 0.{number}"
    with pytest.raises(BadInput) as refused:
        run_batch(batch, {}.__getitem__)
    assert str(refused.value) == f"--executor: got 'here', {expected}"
    nothing = clusters.other_versions("here", "no serving-twin", here)
    assert "found no serving-twin in place of serving-twin 0" in str(nothing)


def test_a_plug_in_travels_as_its_source(tmp_path: Path) -> None:
    plugin = ImportedPlugin("twin_plugin_shipped", "class Here:\n    answer = 42\n", "elsewhere/shipped.py")
    try:
        import_again([plugin])
        import_again([plugin])
        assert plugin in imported_plugins()
        with pytest.raises(TwinError, match=r"another version of the plug-in elsewhere/shipped\.py"):
            import_again([ImportedPlugin(plugin.module, "answer = 43\n", plugin.file)])
        with pytest.raises(BadInput, match="found No module named 'not_installed_anywhere'"):
            run_batch(Batch("here", versions(), (ImportedPlugin("not_installed_anywhere"),), b""), {}.__getitem__)
    finally:
        sys.modules.pop(plugin.module)


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
