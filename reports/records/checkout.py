"""The commit of the code that made a record."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def commit() -> str | None:
    """The commit of this checkout, marked if files have changed since; None outside a checkout.

    Installed code has no checkout of its own, even if a repository is around it.
    """
    if not (ROOT / ".git").exists():
        return None
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
