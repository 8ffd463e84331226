"""Tasks as bytes, and what a worker does with them; all in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scenarios.reading import ImportedPlugin, import_again, imported_plugins, read_scenario
from scenarios.serving import ServingWorkloadSpec
from twin.executors import shipping
from twin.executors.shipping import (
    Batch,
    Cabinet,
    Done,
    Missing,
    Refused,
    Shipper,
    difference,
    run_batch,
    store_parts,
    versions,
)
from twin.sweeps.serving_sweep import ServingSweep, prepare, run_task
from workloads.errors import TwinError
from workloads.trace import Trace

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ("tiny-llama-cpu", "pd-tiny-cpu", "prelude-judges", "chat-sessions", "spear-slo", "roofline-h200-llama-70b")


@pytest.fixture(autouse=True)
def _empty_cabinet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping, "CABINET", Cabinet())


def sweep_of(name: str, *settings: dict[str, Any]) -> ServingSweep:
    path = ROOT / "examples" / f"{name}.yaml"
    fewer = {"workload.requests": 60}
    return prepare(read_scenario(path, "serving"), path, [{**fewer, **item} for item in settings or ({},)])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_shipped_point_has_the_same_bytes(name: str) -> None:
    (task,) = sweep_of(name).tasks
    shipper = Shipper()
    batch = shipper.pack(run_task, [task])
    store_parts(shipper.parts)
    reply = run_batch(batch)
    assert isinstance(reply, Done)
    assert json.dumps(reply.results) == json.dumps([run_task(task)])


def test_step_times_travel_once_for_all_points() -> None:
    tasks = sweep_of("tiny-llama-cpu", *({"engine.max_num_seqs": size} for size in range(1, 21))).tasks
    shipper = Shipper()
    batches = [shipper.pack(run_task, [task]) for task in tasks]
    assert len(shipper.parts) == 1
    assert {batch.parts for batch in batches} == {tuple(shipper.parts)}
    (tables,) = shipper.parts.values()
    assert max(len(batch.tasks) for batch in batches) < 5000 < len(tables)
    together = shipper.pack(run_task, tasks)
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
    shipper = Shipper()
    batch = shipper.pack(len, [*tasks, trace])
    assert len(batch.parts) == 3  # prompts, answers, and the trace
    assert len(batch.tasks) < 3000
    store_parts(shipper.parts)
    workload = shipping._Unpickler(batch.tasks, shipping.CABINET).load()[1][0]
    original, same = (list(source.requests(np.random.default_rng(1), 50)) for source in (workload, tasks[0]))
    assert original == same


def test_a_worker_names_the_parts_that_it_lacks_and_runs_when_it_has_them() -> None:
    shipper = Shipper()
    batch = shipper.pack(run_task, sweep_of("tiny-llama-cpu").tasks)
    assert run_batch(batch, "here") == Missing(batch.parts, "here")
    names: list[str] = []

    def fetch(digest: str) -> bytes:
        names.append(digest)
        return shipper.parts[digest]

    assert isinstance(run_batch(batch, fetch=fetch), Done)
    assert isinstance(run_batch(batch, fetch=fetch), Done)
    assert names == list(batch.parts)


def test_a_full_cabinet_drops_what_was_not_used_for_longest() -> None:
    shipper = Shipper()
    arrays = [np.full(1 << 14, number) for number in range(3)]
    digests = [shipper.pack(len, [array]).parts[0] for array in arrays]
    size = len(next(iter(shipper.parts.values())))
    cabinet = Cabinet(2 * size)
    for digest in digests[:2]:
        cabinet.store({digest: shipper.parts[digest]})
    cabinet.part(digests[0])
    cabinet.store({digests[2]: shipper.parts[digests[2]]})
    assert cabinet.missing(digests) == (digests[1],)
    cabinet.store({digest: shipper.parts[digest] for digest in digests})
    assert cabinet.missing(digests) == ()  # all that came at once stays, or a task of three parts could never run


def test_a_batch_of_another_version_is_refused() -> None:
    versions_there = versions().replace("numpy ", "numpy 0.")
    reply = run_batch(Batch(versions_there, (), b"", ()))
    assert reply == Refused(versions())
    name, _, number = next(part for part in versions().split(", ") if part.startswith("numpy")).partition(" ")
    assert difference(versions(), versions_there) == f"{name} {number} in place of {name} 0.{number}"
    assert difference("no serving-twin", versions()).startswith("no serving-twin in place of serving-twin 0")


def test_a_plug_in_travels_as_its_source(tmp_path: Path) -> None:
    plugin = ImportedPlugin("twin_plugin_shipped", "class Here:\n    answer = 42\n", "elsewhere/shipped.py")
    try:
        import_again([plugin])
        import_again([plugin])
        assert plugin in imported_plugins()
        with pytest.raises(TwinError, match=r"another version of the plug-in elsewhere/shipped\.py"):
            import_again([ImportedPlugin(plugin.module, "answer = 43\n", plugin.file)])
        reply = run_batch(Batch(versions(), (ImportedPlugin("not_installed_anywhere"),), b"", ()))
        assert isinstance(reply, Refused)
        assert "not_installed_anywhere" in reply.found
    finally:
        import sys

        sys.modules.pop(plugin.module)
