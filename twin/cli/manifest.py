"""Where a run came from: versions, commit, command."""

from __future__ import annotations

import platform
import shlex
import sys
from typing import Any

from reports.records.checkout import commit
from twin import __version__

PACKAGES = ("numpy", "scipy", "simpy", "pydantic", "torch")
"""Whose versions may matter to a result. Those that a command has loaded are written down."""


def manifest(asked: dict[str, Any]) -> dict[str, Any]:
    """What `manifest.json` holds, before the run says how it stands."""
    return {
        "command": shlex.join(["twin", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: sys.modules[name].__version__ for name in PACKAGES if name in sys.modules},
        **asked,
    }
