"""A place to try the documentation in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from twin import process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of examples/ in it as a reader has; commands use one process."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "usable_cores", lambda: 1)
    return tmp_path
