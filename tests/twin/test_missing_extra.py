"""Commands without their optional packages say the same: the extra, and a command that installs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twin.cli import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = str(EXAMPLES / "models" / "tiny-llama.json")

COMMANDS = {
    "calibrate": ("live.calibration", ["calibrate", "run", "--device", "cpu", "--model", MODEL, "-o", "measured.yaml"]),
    "engine": ("live.validation.backend", ["validate", str(EXAMPLES / "validate-cpu.yaml")]),
    "bundle": ("live.validation.bundle_backend", ["validate", str(EXAMPLES / "validate-afd-cpu.yaml")]),
    "server": ("live.device", ["serve-live", "--model", MODEL, "--random-weights"]),
    "training": ("live.device", ["adapt", "base", "base", "--steps", "3"]),
    "quality": ("live.adaptation", ["reproduce", "sun", "--quality"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_extra_and_its_command_are_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, command = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    for loaded in [each for each in sys.modules if each.startswith(("live.", "twin.reproductions."))]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)  # as without torch, which it imports
    assert run(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected the extra [live] to be installed: pip install '.[live]' in a checkout (" in line
