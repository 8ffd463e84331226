"""The manifest of a run folder: versions, commit, command, and the run's inputs."""

from __future__ import annotations

import platform
import shlex
import sys
from typing import Any

from reports.records.checkout import commit
from twin import __version__

PACKAGES = ("numpy", "scipy", "simpy", "pydantic", "torch")
"""Packages whose versions may change a result. The manifest names those that are loaded."""


def manifest(inputs: dict[str, Any], call: str | None = None) -> dict[str, Any]:
    """The content of `manifest.json`, before the run sets its status.

    Args:
        inputs: keys of the command's own.
        call: the Python call that made the run; None: the command line of this process.
    """
    return {
        "command": call or shlex.join(["twin", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": _platform(),
        "packages": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
        **inputs,
    }


def _platform() -> str:
    """System, release, machine and C library; `platform.platform` starts a process to ask for the processor, too."""
    system = platform.uname()
    return "-".join((system.system, system.release, system.machine, *filter(None, platform.libc_ver())))
