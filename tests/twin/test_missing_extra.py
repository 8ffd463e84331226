"""Commands without their optional packages say the same: the extra, and a command that installs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LLAMA = str(EXAMPLES / "tiny-llama-cpu.yaml")
MODEL = str(EXAMPLES / "models" / "tiny-llama.json")

VLLM_BLOCKS = "engine.block_size=32"

COMMANDS = {
    "calibrate": ("live.calibration", ["calibrate", "run", "--device", "cpu", "--model", MODEL, "-o", "measured.yaml"]),
    "engine": ("live.validation.backend", ["validate", str(EXAMPLES / "validate-cpu.yaml")]),
    "vllm": ("vllm", ["validate", str(EXAMPLES / "validate-cpu.yaml"), "--engine", "vllm", "--set", VLLM_BLOCKS]),
    "scheduler": ("vllm", ["simulate", LLAMA, "--set", "engine.scheduler=installed-vllm", "--no-figures"]),
    "bundle": ("live.validation.bundle", ["validate", str(EXAMPLES / "validate-afd-cpu.yaml")]),
    "server": ("live.device", ["serve-live", "--model", MODEL, "--random-weights"]),
    "training": ("live.device", ["adapt", "base", "base", "--steps", "3"]),
    "quality": ("live.adaptation", ["reproduce", "sun", "--quality"]),
}

WITHOUT = "import sys; sys.modules[sys.argv[1]] = None; from twin.cli import run; sys.exit(run(sys.argv[2:]))"
"""Runs a command as without torch, which the named module imports; in a process that has imported nothing else."""


ALIKE = ("bundle", "calibrate", "quality", "training", "vllm")
"""Commands that say it by the same code as others, and take seconds to come to it."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in COMMANDS])
def test_the_extra_and_its_command_are_said(name: str, tmp_path: Path) -> None:
    module, command = COMMANDS[name]
    process = [sys.executable, "-c", WITHOUT, module, *command]
    completed = subprocess.run(process, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    extra = "vllm" if module == "vllm" else "live"
    assert f"expected the extra [{extra}] to be installed: pip install '.[{extra}]' in a checkout (" in line
