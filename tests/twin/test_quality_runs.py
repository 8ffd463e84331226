"""The order in which `twin reproduce … --quality` trains: models first, and nothing waits that need not."""

from __future__ import annotations

from itertools import chain

import pytest

from twin.cli.quality_runs import ModelJobs, waves


@pytest.mark.parametrize("jobs", [1, 2, 3, 8])
def test_every_job_runs_once_and_after_its_model(jobs: int) -> None:
    models = [ModelJobs(f"model {i}", i, {f"task {j} of {i}": (i, j) for j in range(2)}) for i in range(3)]
    order = waves(models, jobs)
    keys = [*chain.from_iterable(order)]
    assert sorted(keys) == sorted(
        [f"model {i}" for i in range(3)] + [f"task {j} of {i}" for i in range(3) for j in (0, 1)]
    )
    wave = {key: number for number, each in enumerate(order) for key in each}
    assert all(wave[f"task {j} of {i}"] > wave[f"model {i}"] for i in range(3) for j in (0, 1))
    assert len(order[0]) == min(jobs, 3)
