"""Where a run came from: versions, commit, command."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "scipy", "simpy", "pydantic", "matplotlib")


def manifest(asked: dict[str, Any]) -> dict[str, Any]:
    """What `manifest.json` holds, before the run says how it stands."""
    return {
        "command": shlex.join(["twin", *sys.argv[1:]]),
        "version": _version("serving-twin"),
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        **asked,
    }


def _version(package: str) -> str:
    """As `importlib.metadata.version`, which reads the whole description as an e-mail: 6 ms a package."""
    found = re.search(r"^Version: *(\S+)", metadata.distribution(package).read_text("METADATA") or "", re.MULTILINE)
    return found[1] if found else metadata.version(package)


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
