"""Commands on Dask's own LocalCluster: the bytes of a local run, whatever is killed meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.twin.executors.conftest import ROOT, command, environment, finish, finished_points, results, wait_until
from tests.twin.planning.scenarios import document
from twin.cli import run

distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")

if TYPE_CHECKING:
    from distributed import Client

POINTS = ("--set", "workload.arrivals.rate=5:40:5", "--set", "engine.max_num_seqs=8,64")
LONG = (*POINTS, "--set", "workload.requests=1500", "--no-figures")
"""Sixteen points of some 0.1 s, which go one by one."""


@contextmanager
def cluster() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a cluster of two workers, and its process."""
    line, pipe = [sys.executable, str(Path(__file__).with_name("cluster.py"))], subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster that tests share."""
    with cluster() as (scheduler, _):
        yield scheduler


@contextmanager
def client(address: str) -> Iterator[Client]:
    """A client of the test's own."""
    with closing(distributed.Client(f"tcp://{address}", set_as_default=False)) as dask_client:
        yield dask_client


def local_results(*arguments: str) -> dict[str, Any]:
    """The results of a command in this process."""
    assert run([*arguments, "--jobs", "1", "--runs", "local"]) == 0
    return results(Path("local"))


AFD = f"{ROOT}/examples/afd-tiny-cpu.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", AFD, "--ratio", "1:3", "--set", "requests_per_instance=40", "--requests", "--no-figures"),
        ("simulate", f"{ROOT}/examples/tiny-llama-cpu.yaml", "--replications", "3", "--no-figures"),
        ("plan", "plan.yaml", "--brief", "--no-figures"),
    ],
    ids=["bundles", "replications", "plan"],
)
def test_a_cluster_gives_the_bytes_of_one_process(address: str, serving: Path, arguments: tuple[str, ...]) -> None:
    Path("plan.yaml").write_text(yaml.safe_dump(document(replications=4, window=200)))
    assert run([*arguments, "--executor", f"dask://{address}", "--runs", "there"]) == 0
    assert results(Path("there")) == local_results(*arguments)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_changes_nothing(address: str, serving: Path) -> None:
    arguments = ("sweep", str(serving), *LONG)
    with client(address) as dask_client:
        before = dask_client.run(os.getpid)
        with command(*arguments, "--executor", f"dask://{address}", "--runs", "there") as process:
            wait_until(lambda: finished_points(Path("there")) >= 2)
            os.kill(next(iter(before.values())), signal.SIGKILL)
            _, error = process.communicate()
            assert process.returncode == 0, error
        assert all("simulating" in line for line in error.splitlines()[:-1]), error
        wait_until(lambda: len(dask_client.nthreads()) == 2)  # another was started in its place
        assert set(dask_client.run(os.getpid).values()) != set(before.values())
    assert results(Path("there")) == local_results(*arguments)


@pytest.mark.slow
def test_a_killed_client_is_started_again_and_finishes_anywhere(address: str, serving: Path) -> None:
    arguments = ("sweep", str(serving), *LONG)
    points = 0
    for _ in range(2):
        with command(*arguments, "--executor", f"dask://{address}", "--runs", "there") as process:
            wait_until(lambda points_wanted=points + 2: finished_points(Path("there")) >= points_wanted)
            process.send_signal(signal.SIGKILL)
            process.wait()
        points = finished_points(Path("there"))
    assert 4 <= points < 16
    assert run([*arguments, "--jobs", "1", "--runs", "there"]) == 0  # which takes up the only folder
    assert results(Path("there")) == local_results(*arguments)


@pytest.mark.slow
def test_a_scheduler_that_is_gone_ends_the_command_and_its_points_are_taken_up(serving: Path) -> None:
    arguments = ("sweep", str(serving), *LONG)
    with cluster() as (address, process):
        with command(*arguments, "--executor", f"dask://{address}", "--runs", "there") as sweep:
            wait_until(lambda: finished_points(Path("there")) >= 2)
            process.kill()
            _, error = sweep.communicate()
            assert sweep.returncode == 2
        lines = [line for line in error.splitlines() if "simulating" not in line]
        assert lines == [
            f"twin: dask://{address}: the scheduler is gone; the same command, with any executor, goes on from the"
            " results that are kept"
        ]
    assert 2 <= finished_points(Path("there")) < 16
    code, error = finish(*arguments, "--executor", "dask", "--jobs", "2", "--runs", "there")
    assert code == 0, error
    assert results(Path("there")) == local_results(*arguments)


@pytest.mark.slow
def test_a_worker_of_another_version_is_refused(
    address: str, serving: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretend(version: str | None) -> None:  # by value: a worker does not have this module
        from twin.executors import clusters

        clusters.versions.cache_clear()
        if version is None:
            clusters._digest = clusters._kept  # type: ignore[attr-defined]
        else:
            clusters._kept = clusters._digest  # type: ignore[attr-defined]
            clusters._digest = lambda files: version

    with client(address) as dask_client:
        worker = next(iter(dask_client.nthreads()))
        dask_client.run(pretend, "00000000", workers=[worker])
        try:
            code = run(["sweep", str(serving), "--executor", f"dask://{address}"])
        finally:
            dask_client.run(pretend, None, workers=[worker])
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"twin: --executor: got 'dask://{address}', expected workers of the same version as here")
    assert "found serving-twin 0.1.0 (00000000) in place of serving-twin 0.1.0 (" in line
    assert line.endswith(f"at {worker}")
    assert not Path("runs").exists()


def test_a_scheduler_that_does_not_answer_is_refused(
    serving: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twin.executors.clusters.CONNECT", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        code = run(["simulate", str(serving), "--replications", "2", "--executor", f"dask://{address}"])
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"twin: --executor: got 'dask://{address}', expected a Dask scheduler with workers")
    assert not Path("runs").exists()


def test_a_missing_library_is_named_with_its_extra(serving: Path, refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    for executor, library in (("dask", "distributed"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
        line = refusal("sweep", str(serving), "--executor", executor)
        assert line.startswith(f"twin: --executor: expected the extra [{executor}] to be installed: pip install ")
        assert not Path("runs").exists()
