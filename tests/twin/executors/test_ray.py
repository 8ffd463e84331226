"""Commands on processes of Ray: the bytes of a local run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.twin.executors.conftest import finish, results

pytest.importorskip("ray", reason="the extra [ray] is not installed")


def test_ray_gives_the_bytes_of_one_process(serving: Path) -> None:
    arguments = ("sweep", str(serving), "--set", "workload.arrivals.rate=5:40:5", "--no-figures")
    for executor, jobs in (("ray", "2"), ("local", "1")):
        code, error = finish(*arguments, "--executor", executor, "--jobs", jobs, "--runs", executor)
        assert code == 0, error
        assert all("simulating" in line for line in error.splitlines()[:-1]), error
    assert results(Path("ray")) == results(Path("local"))
