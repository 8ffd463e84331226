"""`twin plan` as it is typed, in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from twin.cli import run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Plans a scenario with flags; returns the document, or what is printed without `--json`. `files`: further ones."""

    def printed(scenario: dict[str, Any], *flags: str, code: int = 0, **files: dict[str, Any]) -> Any:
        for name, document in {"plan": scenario, **files}.items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
        capsys.readouterr()
        assert run(["plan", "plan.yaml", "--jobs", "1", *flags]) == code
        output = capsys.readouterr().out
        return json.loads(output) if "--json" in flags else output

    return printed


@pytest.fixture
def refused(folder: Path, refusal: Callable[..., str]) -> Callable[..., str]:
    """Plans a scenario with flags that must be refused; returns the line."""

    def line(scenario: dict[str, Any], *flags: str) -> str:
        (folder / "plan.yaml").write_text(yaml.safe_dump(scenario))
        return refusal("plan", "plan.yaml", "--jobs", "1", *flags)

    return line
