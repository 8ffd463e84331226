"""A command ended by a signal: its worker processes end with it, and the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reports.run_directory import open_run
from twin.executors.executor import Processes

PATIENCE = 60.0
LONG = ("--ratio", "1:12", "--jobs", "2", "--set", "requests_per_instance=6000")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m twin` with these arguments; killed at the end of the block if it is still there."""
    command = [sys.executable, "-m", "twin", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "this should have happened long ago"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def run_until_points(process: subprocess.Popen[str], folder: Path, points: int) -> tuple[Path, list[int]]:
    """Wait for finished points and the two workers; returns the file of points and the workers' ids."""

    def finished() -> Path | None:
        assert process.poll() is None, process.stderr and process.stderr.read()
        file = next(folder.glob("runs/*/points.jsonl"), None)
        return file if file and file.read_text().count("\n") >= points else None

    wait_until(finished)
    workers = children(process.pid)
    assert len(workers) == 2
    file = finished()
    assert file is not None
    return file, workers


@LINUX
@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(it, marks=pytest.mark.slow) for it in (signal.SIGKILL, signal.SIGTERM))]
)
def test_workers_end_with_a_sweep_and_its_points_are_taken_up(scenario: Path, sweep, number: signal.Signals) -> None:
    with started("sweep", str(scenario), "--no-figures", *LONG) as process:
        points, workers = run_until_points(process, scenario.parent, 2)
        process.send_signal(number)
        _, error = process.communicate(timeout=PATIENCE)
    if number == signal.SIGKILL:
        wait_until(lambda: not any(map(alive, workers)))
    else:
        assert process.returncode == 130
        assert not any(map(alive, workers))
        assert json.loads((points.parent / "manifest.json").read_text())["status"] == "interrupted"
        (line,) = (line for line in error.splitlines() if "simulating" not in line)
        lines_before = points.read_text().count("\n")
        assert f"interrupted; {lines_before} finished points are kept in runs/{points.parent.name}" in line
    finished = points.read_text().splitlines()
    resumed = sweep(*LONG)
    assert resumed["run"]["id"] == points.parent.name
    assert len(resumed["points"]) == 12
    assert points.read_text().splitlines()[: len(finished)] == finished


HOLDER = """
import multiprocessing, os, sys, time
from pathlib import Path
from reports.run_directory import open_run
open_run(Path(sys.argv[1]), "sweep", "same", {}, resume=False).add_point("0", {})
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
child.start()
Path(sys.argv[1], "child").write_text(str(child.pid))
os._exit(1)
"""


@LINUX
def test_a_process_forked_from_the_holder_does_not_hold_the_run_folder(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], check=False)
    child = int((tmp_path / "child").read_text())
    try:
        assert alive(child)
        with open_run(tmp_path, "sweep", "same", {}, resume=True) as taken_up:
            assert taken_up.points() == {"0": {}}
    finally:
        os.kill(child, signal.SIGKILL)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def fail(seconds: float) -> float:
    if seconds < 0:
        raise ValueError("below 0")
    return sleep(seconds)


def test_an_error_in_the_block_or_in_a_task_ends_the_others_at_once() -> None:
    begin = time.monotonic()
    with (
        pytest.raises(ValueError, match="below 0"),
        Processes(2).each_as_done(fail, [PATIENCE, -1.0, PATIENCE]) as results,
    ):
        list(results)
    with pytest.raises(KeyboardInterrupt), Processes(2).each_as_done(sleep, [PATIENCE, PATIENCE]):
        raise KeyboardInterrupt
    assert time.monotonic() - begin < PATIENCE
