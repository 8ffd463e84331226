"""Settings of the interpreter and its libraries that make simulations quicker."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator


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


def use_one_thread() -> None:
    """Have numpy use one thread for linear algebra, unless the environment says otherwise; before numpy is imported.

    Simulations have little of it, and OpenBLAS's threads spin while they wait: 60 ms of CPU time on two cores.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
