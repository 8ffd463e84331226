"""The version says whether hot modules run compiled."""

from __future__ import annotations

import pytest

from schedulers import engine_core
from twin.cli import run
from twin.process import runs_compiled


def test_the_version_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs_compiled() is not engine_core.__file__.endswith(".py")
    run(["--version"])
    assert capsys.readouterr().out.strip().endswith("(compiled)" if runs_compiled() else "(pure Python)")
