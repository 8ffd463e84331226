"""A scenario small enough to sweep in a test, and the command line in process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twin.cli import run

SMALL = """\
schema: twin.scenario/1
kind: afd-bundle
name: small
calibration: deepseek-v3-ascend-910c
seed: 7
batch_size: 16
requests_per_instance: 120
ratio: "1,2,3"
workload:
  prefill: {distribution: geometric, mean: 100}
  decode: {distribution: geometric, mean: 20}
"""

Sweep = Callable[..., dict[str, Any]]


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small scenario's file, in the current directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return file


@pytest.fixture
def sweep(scenario: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Run `twin sweep small.yaml --json` with more arguments; returns the document."""

    def call(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        jobs = () if "--jobs" in arguments else ("--jobs", "1")
        code = run(["sweep", str(scenario), "--json", "--no-figures", *jobs, *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        document: dict[str, Any] = json.loads(captured.out)
        return document

    return call
