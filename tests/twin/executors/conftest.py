"""Commands whose results are compared between executors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 120.0

SERVING = """\
schema: twin.scenario/1
kind: serving
name: small
workload:
  requests: 400
  prefill: {distribution: lognormal, mean: 200, cv: 1.0}
  decode: {distribution: geometric, mean: 16}
  arrivals: {process: poisson, rate: 20}
engine: {num_gpu_blocks: 2000, max_num_seqs: 64}
step_time: {source: linear, overhead: 0.01, per_token: 6.0e-5, per_kv_token: 2.0e-7}
"""


def environment() -> dict[str, str]:
    """The environment of commands and clusters, which import the packages under test."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small serving scenario, in the current folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(SERVING)
    return file


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m twin` with these arguments; killed at the end of the block if it is still there."""
    line = [sys.executable, "-m", "twin", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(*arguments: str) -> tuple[int, str]:
    """Run a command to its end; returns its exit code and stderr."""
    with command(*arguments) as process:
        _, error = process.communicate(timeout=PATIENCE)
        return process.returncode, error


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "this should have happened long ago"
        time.sleep(0.01)


def finished_points(runs: Path) -> int:
    """The number of points on disk in the only run folder."""
    file = next(runs.glob("*/points.jsonl"), None)
    return file.read_text().count("\n") if file else 0


def results(runs: Path) -> dict[str, Any]:
    """The files of the only run folder that must not depend on the executor: each one's bytes by name.

    The summary is without the folder's own name, and the points are sorted, since they come in order of completion.
    """
    (folder,) = runs.iterdir()
    results_by_file: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.parquet")
    }
    summary = json.loads((folder / "summary.json").read_text())
    del summary["run"]
    results_by_file["summary.json"] = json.dumps(summary).encode()
    points = folder / "points.jsonl"
    results_by_file["points.jsonl"] = sorted(points.read_bytes().splitlines()) if points.exists() else []
    return results_by_file
