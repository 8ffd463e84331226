"""`twin adapt` as tests type it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twin.cli import run


def adapt(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The document that a command prints."""
    capsys.readouterr()
    assert run(["adapt", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which a command ends."""
    capsys.readouterr()
    assert run(["adapt", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line
