"""A scenario small enough to sweep in a test, and the command line in process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latency_models.io.config_io import write_yaml
from tests.twin.serving.scenarios import scenario as serving
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

Printed = Callable[..., Any]


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small scenario's file, in the current directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a small serving scenario, in the current directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "s.yaml"
    file.write_text(write_yaml(serving()))
    return file


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run a command with `--json`; returns the document that it prints."""

    def call(*arguments: str) -> Any:
        capsys.readouterr()
        code = run([*arguments, "--json"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    return call


@pytest.fixture
def sweep(scenario: Path, printed: Printed) -> Printed:
    """Run `twin sweep small.yaml --json` with more arguments; returns the document."""

    def call(*arguments: str) -> Any:
        jobs = () if "--jobs" in arguments else ("--jobs", "1")
        return printed("sweep", str(scenario), "--no-figures", *jobs, *arguments)

    return call
