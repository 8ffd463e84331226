"""Where a run came from: versions, commit, command."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from twin import __version__

PACKAGES = ("numpy", "scipy", "simpy", "pydantic", "torch")
"""Whose versions may matter to a result. Those that a command has loaded are written down."""


def manifest(asked: dict[str, Any]) -> dict[str, Any]:
    """What `manifest.json` holds, before the run says how it stands."""
    return {
        "command": shlex.join(["twin", *sys.argv[1:]]),
        "version": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
        **asked,
    }


def _commit() -> str | None:
    """The commit this code was checked out at, marked when it has been changed since; None outside a checkout."""
    here = Path(__file__).resolve().parent.parent.parent
    if not (here / ".git").exists():
        return None
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.strip()
