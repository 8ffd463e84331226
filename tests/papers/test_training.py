"""The order in which `twin reproduce … --quality` trains: models first, and nothing waits that need not."""

from __future__ import annotations

import pytest

from papers.common import Models, Task, waves


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
