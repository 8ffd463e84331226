from __future__ import annotations

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_the_examples_of_the_trace_reference_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(DOCS / "traces.md"), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0
