"""Tells whether the scheduler and the simulated engine run compiled (hatch_build.py) or as Python."""

from __future__ import annotations

from importlib.util import find_spec


def runs_compiled() -> bool:
    """Tell whether `schedulers.engine_core` is a C extension. It is found, not imported."""
    core = find_spec("schedulers.engine_core")
    return core is not None and core.origin is not None and not core.origin.endswith(".py")
