"""Settings of the interpreter and its libraries that make simulations quicker, and whether modules are compiled."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec


@contextlib.contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector where many objects are made that stay, and no cycles are dropped."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def making_what_stays() -> Iterator[None]:
    """Pause the cyclic garbage collector while modules and tables are read, and have it pass over them ever after.

    Otherwise it looks at half a million objects and finds nothing. Only the first command of a process does so.
    """
    with paused_garbage_collection():
        yield
        if not gc.get_freeze_count():
            gc.freeze()


def configure_libraries() -> None:
    """Have libraries start quickly, unless the environment says otherwise; before they are imported.

    - numpy uses one thread for linear algebra. Simulations have little of it, and OpenBLAS's threads spin while they
      wait: 60 ms of CPU time on two cores.
    - pydantic looks for no plug-ins, for which it would read the metadata of every installed distribution.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def runs_compiled() -> bool:
    """Tell whether `schedulers.engine_core` is a C extension. It is found, not imported."""
    core = find_spec("schedulers.engine_core")
    return core is not None and core.origin is not None and not core.origin.endswith(".py")
