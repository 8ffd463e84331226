"""Shared parts of papers: published tables beside their programs, and the order in which small models are trained."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from papers.common import Models, Task, waves

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "published"

TABLES = (
    "afd/optimal_ratio", "afd/latency_parameters", "prelude/oneshot", "prelude/decode_control", "prelude/concurrency",
    "spear/chunk_scheduling", "sun/concurrency", "sun/decode_pool",
)  # fmt: skip


@pytest.mark.skipif(not SHARED.exists(), reason="the published tables are not at hand")
@pytest.mark.parametrize("name", TABLES)
def test_the_project_s_copy_of_the_facts(name: str) -> None:
    paper, table = name.split("/")
    copied, original = ROOT / "papers" / paper / "data" / f"{table}.csv", SHARED / f"{paper}_{table}.csv"
    assert rows(copied) == rows(original)


def rows(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
def test_every_job_runs_once_and_after_its_model(jobs: int) -> None:
    models = [
        Models(Task(f"model {i}", print, ()), [Task(f"task {j} of {i}", print, ()) for j in range(2)]) for i in range(3)
    ]
    order = waves(models, jobs)
    wave = {task.name: number for number, tasks in enumerate(order) for task in tasks}
    assert len(wave) == sum(map(len, order)) == 9
    assert all(wave[task.name] > wave[model.train.name] for model in models for task in model.compare)
    assert len(order[0]) == min(jobs, 3)
